"""A run and its parts: what it works with, what it keeps, and how it is resumed, restarted and ended."""

from accmt.run.run import TEST_LOSS as TEST_LOSS
from accmt.run.run import Actions as Actions
from accmt.run.run import EvaluationRun as EvaluationRun
from accmt.run.run import Run as Run
