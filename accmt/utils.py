"""The names of the original accmt's `utils`: a few exist, and the error about another has the line to write."""

from accmt.addons.hints.original import find_in_module as __getattr__  # noqa: F401
