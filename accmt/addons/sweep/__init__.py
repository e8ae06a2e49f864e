"""Sweeps: searches of hyper-parameters in which nothing can be lost."""
