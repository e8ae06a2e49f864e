"""The list of all features."""

from __future__ import annotations

from accmt.features.averaged_weights import Averages
from accmt.features.bad_samples import BadSampleCounts
from accmt.features.hooks import Feature
from accmt.features.loss_guard import LossGuard
from accmt.features.missing_gradients import MissingGradients
from accmt.features.out_of_memory import OutOfMemory
from accmt.features.quantized_weights import QuantizedWeights
from accmt.options import Settings
from accmt.registry import added_features

_OF_CORE: tuple[type[Feature], ...] = (
    BadSampleCounts,
    OutOfMemory,
    LossGuard,
    MissingGradients,  # after it: steps that it skips are not checked
    QuantizedWeights,
    Averages,
)


def all_features(settings: Settings) -> tuple[type[Feature], ...]:
    """Return the features that a run may use, in the order in which their hooks are called: those of add-ons last."""
    return (*_OF_CORE, *added_features(settings.is_set))
