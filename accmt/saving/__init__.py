"""What lies in a model folder: weights and the status of the run that wrote them; and which weights are kept."""

from accmt.saving.reading import load_weights
from accmt.saving.selection import TRAIN_LOSS, VALID_LOSS, Selection
from accmt.saving.status import read_status, write_status
from accmt.saving.weights import SavedWeights, save_weights

__all__ = [
    "TRAIN_LOSS",
    "VALID_LOSS",
    "SavedWeights",
    "Selection",
    "load_weights",
    "read_status",
    "save_weights",
    "write_status",
]
