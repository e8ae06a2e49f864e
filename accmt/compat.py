"""Base classes that let your classes use hook and method names of other trainers."""

from accmt.addons.hints.other_names import HOOK_NAMES as HOOK_NAMES
from accmt.addons.hints.other_names import OtherHookNames, OtherTrainerNames

__all__ = ["OtherHookNames", "OtherTrainerNames"]
