"""Modules of the original accmt, found as `accmt.<name>`: their names are those of the package."""
