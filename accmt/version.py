"""The version of the package, read by the build and by every run that records it."""

__version__ = "0.1.0"
