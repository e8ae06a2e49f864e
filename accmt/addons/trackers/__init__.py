"""Trackers beside TensorBoard, MLflow and Weights & Biases, one file each."""
