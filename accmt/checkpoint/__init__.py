"""Checkpoints: writing, finding and verifying the state that survives a crash."""
