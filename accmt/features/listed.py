"""The list of all features."""

from __future__ import annotations

from accmt.callbacks import Callback
from accmt.features.loss_guard import LossGuard
from accmt.features.out_of_memory import OutOfMemory
from accmt.module import AcceleratorModule
from accmt.options import Settings
from accmt.registry import added_features, addon
from accmt.run.features import Feature

_OF_CORE: tuple[type[Feature], ...] = (OutOfMemory, LossGuard)


def all_features(settings: Settings, *owners: AcceleratorModule | Callback) -> tuple[type[Feature], ...]:
    """Return the features that a run may use, in the order in which their hooks are called: those of add-ons last.

    Args:
        settings: The settings, some of which turn features on.
        *owners: The module and the callbacks, which may bring features.
    """
    brought = dict.fromkeys(type(owner).brings_feature for owner in owners)
    return (*_OF_CORE, *added_features(settings.is_set), *(addon(name) for name in brought if name is not None))
