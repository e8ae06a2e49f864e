"""Several processes that train one model: wrapping it, averaging its gradients, sending its buffers."""
