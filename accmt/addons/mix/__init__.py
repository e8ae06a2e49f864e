"""Mixing data sets in known shares, and the loss of each."""
