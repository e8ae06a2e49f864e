"""Which versions of other libraries accmt works with, and every branch by version.

`FLOORS` has the lower bounds of pyproject.toml, for what is installed without pip's consent. `BRANCHES` names each
function that does something else for an older version, with the floor at which that can go.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accmt.errors import MissingPackageError, explain

if TYPE_CHECKING:
    from accelerate import Accelerator

FLOORS: Mapping[str, str] = {
    "torch": "2.9",
    "accelerate": "1.10.1",
    "transformers": "5.4",
    "huggingface_hub": "1.0",
    "safetensors": "0.8",
    "pydantic": "2.11",
    "annotated_types": "0.6",
    "peft": "0.19",
    "bitsandbytes": "0.50",
    "torchao": "0.18",
    "liger_kernel": "0.8",
    "torchmetrics": "1.9",
}
"""The lowest version of each package, by the name under which it is imported."""

BRANCHES: Mapping[str, tuple[str, str]] = {
    "may_deadlock_in_forks": ("python", "3.12"),
    "without_tensors": ("torch", "2.10"),
    "checkpoint_activations": ("transformers", "5.23"),
    "parallel_size": ("accelerate", "1.12"),
    "make_accelerator": ("accelerate", "1.13"),
    "prepare_alone": ("accelerate", "1.14"),
    "why_states_are_inexact": ("datasets", "5.1"),
}
"""For each function of this room that goes by a version: the package, and the floor at which that can go."""


@cache
def require(name: str, by: str | None = None) -> None:
    """Check that a package can be imported, and that it is new enough.

    Args:
        name: One of `FLOORS`.
        by: What needs it, where that is not plain.

    Raises:
        MissingPackageError: It is not installed, only in part, or older than accmt works with; the message has the
            line for pip.
    """
    floor = FLOORS[name]
    wanted = f"{name.replace('_', '-')}>={floor}"
    try:
        module = import_module(name)
    except ImportError as error:
        raise _unusable(name, by or name, wanted, error) from error
    version = _version_of(module)
    if version is not None and release_of(version) < release_of(floor):
        raise MissingPackageError(explain(by or name, f"{name} {version}", wanted, f'pip install "{wanted}"'))


def release_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without what follows them.

    A build before a release counts as that release: images of vendors have such builds of torch ("2.11.0a0+nv26.1").
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def may_deadlock_in_forks() -> bool:
    """Return whether a process that is forked while another thread waits for the interpreter may wait for ever.

    Source: python/cpython#112275, mended in 3.11.8; pyproject.toml cannot ask for a patch release of one minor only.
    """
    return sys.version_info < (3, 12)


def without_tensors(annotation: str) -> str:
    """Return an annotation of an optimizer's argument without the tensors that it may be; torch 2.9 writes `Union`."""
    return re.sub(r"(?:typing\.)?Union\[(\w+), torch\.Tensor\]", r"\1", annotation).replace(" | torch.Tensor", "")


def checkpoint_activations(model: Any, kwargs: Mapping[str, Any]) -> None:
    """Let a transformers model recompute the activations of its layers; before 5.23 the method has another name."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=dict(kwargs))
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(kwargs))


def parallel_size(config: Any, name: str) -> int:
    """Return one size of Accelerate's `ParallelismConfig`; before 1.12 it has none of sequences ("sp")."""
    size: int = getattr(config, f"{name}_size", 1)
    return size


def make_accelerator(arguments: Mapping[str, Any]) -> Accelerator:
    """Return an Accelerator; before 1.13 one after a first with a mesh fails where that is not among its arguments."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, is_initialized

    own = dict(arguments)
    if own.get("parallelism_config") is None and is_initialized():
        own["parallelism_config"] = AcceleratorState().parallelism_config
    return Accelerator(**own)


def why_states_are_inexact() -> str | None:
    """Return why streams of the imported `datasets` cannot resume from their state; None where they can.

    Before 5.1 they skip samples after a filter (4.8), repeat some (5.0) or begin again (3.6), without an error.
    """
    version, (_, since) = sys.modules["datasets"].__version__, BRANCHES["why_states_are_inexact"]
    if release_of(version) >= release_of(since):
        return None
    return f"streams of datasets {version} lose or repeat samples when they resume; those of {since} do not"


def _version_of(module: Any) -> str | None:
    """Return the version of an imported package; None where neither it nor its metadata say."""
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    return _version_in_metadata(module.__name__)


def _version_in_metadata(name: str) -> str | None:
    from importlib import metadata  # costs milliseconds, and most packages have the attribute

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _unusable(name: str, where: str, wanted: str, error: ImportError) -> MissingPackageError:
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return MissingPackageError(explain(where, f"{name} is not installed", wanted, f'pip install "{wanted}"'))
    if (version := _version_in_metadata(name)) is not None and release_of(version) < release_of(FLOORS[name]):
        return MissingPackageError(explain(where, f"{name} {version}", wanted, f'pip install "{wanted}"'))
    why, _, _ = str(error).partition("\n")
    got = f"{name} is installed, but cannot be imported: {why}"
    do = f'pip install --force-reinstall --no-deps "{wanted}", or install what the message names'
    return MissingPackageError(explain(where, got, wanted, do))
