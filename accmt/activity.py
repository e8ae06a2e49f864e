"""What a process is doing, read from its stack, for messages about several processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parent)
_CALLS = ("validate", "test", "predict", "save_model", "save_checkpoint", "load_checkpoint")
# Of several that fit, the first.
_PLACES = {
    "/data/": "reading data",
    "/loop/train_step.py": "a training step",
    "/features/manual.py": "a training step",
    "/loop/optimizer_step.py": "an optimizer step",
    "/loop/evaluation.py": "an evaluation",
    "/loop/prediction.py": "a prediction",
    "/loop/preflight.py": "the trial before training",
    "/loop/row_logger.py": "logging",
    "/recovery/checkpoints.py": "saving a checkpoint",
    "/recovery/model_saver.py": "saving the model",
    "/engine/replicas.py": "comparing replicas",
    "/metrics/running_averages.py": "",
    "/metrics/": "computing metrics",
    "/features/loss_guard.py": "checking losses",
    "/checkpoint/": "saving a checkpoint",
    "/saving/": "saving the model",
    "/setup/": "setting up the run",
    "/trainer/standalone_evaluation.py": "",
    "/loop/fit.py": "fit",
}


def describe_activity(frame: FrameType | None) -> str:
    """Return what the code of a frame, and what called it, is doing: "trainer.test in on_epoch_end (train.py:7)"."""
    words: list[str] = []
    place = ""
    while frame is not None:
        code, file = frame.f_code, frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            words += _of_package(file.removeprefix(_PACKAGE), code.co_name)
        elif _is_of_user(file):
            place = place or f"{Path(file).name}:{frame.f_lineno}"
            words += [code.co_name] if code.co_name.startswith("on_") or code.co_name.endswith("_step") else []
        frame = frame.f_back
    named = list(dict.fromkeys(word for word in words if word))
    if len(named) > 1:
        named = [word for word in named if word != "fit"]
    called = next((index for index, word in enumerate(named) if word.startswith("trainer.")), 0)
    named = named[called:]  # what such a call does inside explains nothing
    return " in ".join(named[:3] or ["the program"]) + (f" ({place})" if place else "")


def _of_package(file: str, function: str) -> Iterator[str]:
    if file == "/trainer/trainer.py":
        yield f"trainer.{function}" if function in _CALLS else ""
    else:
        yield next((words for start, words in _PLACES.items() if file.startswith(start)), "")


def _is_of_user(file: str) -> bool:
    return not any(part in file for part in ("site-packages", "/lib/python", "<"))
