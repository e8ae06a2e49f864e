"""For people from other trainers: bases that take names of theirs, and what to write here instead of others."""

from accmt.compat.other_names import OtherHookNames, OtherTrainerNames

__all__ = ["OtherHookNames", "OtherTrainerNames"]
