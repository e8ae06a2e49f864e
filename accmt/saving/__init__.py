"""The contents of a model folder: weights and the status of the run that wrote them; and which weights are kept."""

from accmt.saving.load_weights import load_weights
from accmt.saving.model_folder import (
    RUN_KEY,
    ModelFolderClaim,
    holds_model_of,
    keep_previous,
    read_status,
    remove_surplus,
    write_hps,
    write_status,
    write_trainer_config,
)
from accmt.saving.patience import Patience, may_stop
from accmt.saving.selection import TRAIN_LOSS, VALID_LOSS, Selection, name_by_rules, without_validation
from accmt.saving.weights import SavedWeights, require_storable, save_weights

__all__ = [
    "ModelFolderClaim",
    "RUN_KEY",
    "TRAIN_LOSS",
    "VALID_LOSS",
    "Patience",
    "SavedWeights",
    "Selection",
    "holds_model_of",
    "keep_previous",
    "load_weights",
    "may_stop",
    "name_by_rules",
    "read_status",
    "remove_surplus",
    "require_storable",
    "save_weights",
    "without_validation",
    "write_hps",
    "write_status",
    "write_trainer_config",
]
