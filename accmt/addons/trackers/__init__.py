"""Trackers other than TensorBoard, one file each."""
