"""Survives failures: checkpoints, resume, restarts, orderly shutdown, saved models."""
