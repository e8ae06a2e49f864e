"""Supported versions of other libraries, and every version-dependent branch.

`FLOORS` has the lower bounds of pyproject.toml, for packages that were installed without pip's checks. `BRANCHES` lists
each function that behaves differently with an older version, and the floor at which the branch can be removed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accmt.errors import MissingPackageError, fail

if TYPE_CHECKING:
    from accelerate import Accelerator

FLOORS: Mapping[str, str] = {
    "torch": "2.9",
    "accelerate": "1.10.1",
    "transformers": "5.4",
    "huggingface_hub": "1.0",
    "safetensors": "0.8",
    "pydantic": "2.12",  # 2.11 does not check what is in a Mapping where it is strict
    "peft": "0.19",
    "bitsandbytes": "0.50",
    "torchao": "0.18",
    "liger_kernel": "0.8",
    "torchmetrics": "1.9",
}
"""The lowest supported version of each package, by import name."""

BRANCHES: Mapping[str, tuple[str, str]] = {
    "may_deadlock_in_forks": ("python", "3.12"),
    "without_tensors": ("torch", "2.10"),
    "checkpoint_activations": ("transformers", "5.23"),
    "parallel_size": ("accelerate", "1.12"),
    "make_accelerator": ("accelerate", "1.13"),
    "prepare_alone": ("accelerate", "1.14"),
    "why_states_are_inexact": ("datasets", "5.1"),
}
"""For each version-dependent function of this package: the library, and the floor at which the branch can go."""


@cache
def require(name: str, by: str | None = None) -> None:
    """Check that a package can be imported and is new enough.

    Args:
        name: One of `FLOORS`.
        by: What needs it, if that is not obvious.

    Raises:
        MissingPackageError: It is missing, only partly installed, or too old; the message contains the pip command.
    """
    floor, where = FLOORS[name], by or name
    wanted = f"{name.replace('_', '-')}>={floor}"
    do = f'pip install "{wanted}"'
    try:
        module = import_module(name)
    except ImportError as error:
        version = _version_in_metadata(name)
        # An old version may fail to import as well, because of other packages that are newer: its version is the cause.
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            got = f"{name} is not installed"
        elif version is not None and release_of(version) < release_of(floor):
            got = f"{name} {version}"
        else:
            why, _, _ = str(error).partition("\n")
            got = f"{name} is installed, but cannot be imported: {why}"
            do = f'pip install --force-reinstall --no-deps "{wanted}", or install the package in the message'
        raise fail(MissingPackageError, where, got=got, expected=wanted, do=do) from error
    version = _version_of(module)
    # Installed without pip's checks, as in many images of vendors.
    if version is not None and release_of(version) < release_of(floor):
        raise fail(MissingPackageError, where, got=f"{name} {version}", expected=wanted, do=do)


def release_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without any suffix.

    A pre-release build counts as the release: vendors' images have such builds of torch ("2.11.0a0+nv26.1").
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def may_deadlock_in_forks() -> bool:
    """Return whether a process that is forked while another thread waits for the interpreter may hang.

    Source: python/cpython#112275, fixed in 3.11.8; pyproject.toml cannot require a patch release of only one minor
    version.
    """
    return sys.version_info < (3, 12)


def without_tensors(annotation: str) -> str:
    """Return an annotation of an optimizer's argument without its tensor alternative; torch 2.9 writes `Union`."""
    return re.sub(r"(?:typing\.)?Union\[(\w+), torch\.Tensor\]", r"\1", annotation).replace(" | torch.Tensor", "")


def checkpoint_activations(model: Any, kwargs: Mapping[str, Any]) -> None:
    """Recompute the activations of a transformers model's layers; before 5.23 the method has another name."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=dict(kwargs))
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(kwargs))


def parallel_size(config: Any, name: str) -> int:
    """Return one size of Accelerate's `ParallelismConfig`; before 1.12 it has no sequence parallelism ("sp")."""
    size: int = getattr(config, f"{name}_size", 1)
    return size


def make_accelerator(arguments: Mapping[str, Any]) -> Accelerator:
    """Return an Accelerator; before 1.13 creating one after another that has a mesh fails unless it is passed again."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, is_initialized

    complete = dict(arguments)
    if complete.get("parallelism_config") is None and is_initialized():
        complete["parallelism_config"] = AcceleratorState().parallelism_config
    return Accelerator(**complete)


def why_states_are_inexact() -> str | None:
    """Return why streams of the imported `datasets` cannot resume exactly from their state, or None.

    Before 5.1 they skip samples after a filter (4.8), repeat some (5.0) or start over (3.6), without an error.
    """
    version, (_, since) = sys.modules["datasets"].__version__, BRANCHES["why_states_are_inexact"]
    if release_of(version) >= release_of(since):
        return None
    return f"streams of datasets {version} lose or repeat samples on resume; those of {since} do not"


def _version_of(module: Any) -> str | None:
    """Return the version of an imported package; None if neither it nor its metadata contain one."""
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
