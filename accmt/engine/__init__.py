"""Training one model on several processes: wrapping it, averaging its gradients, synchronizing its buffers."""
