"""`accmt.hp_search` of the original."""

from accmt.addons.hints.original import find_in_module as __getattr__  # noqa: F401
