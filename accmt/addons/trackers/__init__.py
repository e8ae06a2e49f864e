"""Trackers other than TensorBoard, MLflow and Weights & Biases, one file each."""
