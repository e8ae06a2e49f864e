"""Checkpoints: what survives a crash, how it is written, found again and verified."""
