"""From the data of a run to its loaders."""

from accmt.loaders.building import build_evaluation_loader as build_evaluation_loader
from accmt.loaders.building import end_workers as end_workers
from accmt.loaders.building import find_collate as find_collate
from accmt.loaders.loaders import Loaders as Loaders
from accmt.loaders.loaders import at_epoch_of_building as at_epoch_of_building
from accmt.loaders.loaders import check_reloading as check_reloading
from accmt.loaders.user_data import Evaluation as Evaluation
from accmt.loaders.user_data import Purpose as Purpose
from accmt.loaders.user_data import Stage as Stage
from accmt.loaders.user_data import UserData as UserData
from accmt.loaders.user_data import find_data as find_data
from accmt.loaders.user_data import find_train_data as find_train_data
from accmt.loaders.user_data import find_validation_data as find_validation_data
from accmt.loaders.user_data import name_sets as name_sets
