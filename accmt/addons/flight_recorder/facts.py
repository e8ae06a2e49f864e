"""What a run starts with: how it was launched, and everything that its results may depend on."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import xxhash

from accmt.addons.launches import describe_launch, main_file
from accmt.data.base import length_of
from accmt.files import current_folder
from accmt.processes import gather_objects, num_data_processes
from accmt.run import Run
from accmt.secrets import hide, hide_text
from accmt.version import __version__

_PACKAGES = ("accelerate", "transformers", "peft", "datasets", "numpy", "torchao", "bitsandbytes")
_LARGEST_DIFF = 2**20
_MOST_FILES = 500

_OF_SESSION = (
    "_", "SHLVL", "PWD", "OLDPWD", "SSH_", "TMUX", "TERM", "WINDOWID", "XDG_", "TORCHELASTIC_", "MASTER_PORT",
    "PYTEST_",
)  # fmt: skip
"""Environment variables, or their beginnings, that differ in each terminal or launch."""

MATTER = (
    "versions", "hardware", "processes", "threads", "device", "precision", "weights",
    "settings", "hps", "program", "seed",
)  # fmt: skip
"""The facts that explain why a step is computed differently."""


def describe_start(run: Run) -> dict[str, Any]:
    """Return what a run starts with.

    Processes: collective.
    """
    dataset = run.train_loader.source.dataloader.dataset
    own = {"host": socket.gethostname(), "device": _name_device(run.device)}
    types = {str(parameter.dtype).removeprefix("torch.") for parameter in run.unwrapped_model.parameters()}
    facts: dict[str, Any] = hide(
        {
            **describe_launch(run),
            "data_processes": num_data_processes(),
            "versions": _versions(),
            "hardware": gather_objects(own),
            "threads": torch.get_num_threads(),
            "device": run.device.type,
            "is_deterministic": run.device.type == "cpu" or torch.are_deterministic_algorithms_enabled(),
            "precision": str(run.accelerator.mixed_precision),
            "weights": " and ".join(sorted(types)),
            "program": _digest_program(type(run.module)),
            "git": _describe_git(Path(main_file() or ".").parent),
            "data": {"samples": length_of(dataset), "kind": type(dataset).__name__},
            "variables": _digest_variables(),
            "lessons": run.recovery.lessons,
            "groups": [len(group["params"]) for group in run.stepper.optimizer.param_groups],
        }
    )
    return facts


def find_changes(before: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str] = MATTER) -> list[str]:
    """Return what has changed between two starts, of what may change results: "torch 2.9 -> 2.10"."""
    changes = []
    for name in names:
        one, other = before.get(name), now.get(name)
        if one == other:
            continue
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
            said = "code: " if name == "program" else ""
            changes += [said + (key if said else f"{key} {one.get(key)} -> {other.get(key)}") for key in keys]
        else:
            changes.append(f"{name} {one} -> {other}")
    return changes


def _digest_variables() -> dict[str, str]:
    """Return four digits of a digest for each environment variable: they show a change, but not the value."""
    return {
        name: xxhash.xxh32_hexdigest(value.encode(errors="surrogateescape"))[:4]
        for name, value in sorted(os.environ.items())
        if not name.startswith(_OF_SESSION)
    }


def _digest_program(kind: type) -> dict[str, str]:
    """Return a digest of each file of the user's program: the script, the module's file, and what lies beside them."""
    main = main_file()
    of_module = getattr(sys.modules.get(kind.__module__), "__file__", None)
    files = {current_folder() / file for file in (main, of_module) if file}
    folders = {file.parent for file in files if not _is_installed(file)}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and not _is_installed(Path(file)):
            path = current_folder() / file
            if any(folder in path.parents for folder in folders):
                files.add(path)
    found = {}
    for file in sorted(files)[:_MOST_FILES]:
        try:
            found[str(file)] = xxhash.xxh3_64_hexdigest(file.read_bytes())
        except OSError:  # a notebook's cell, a file that was deleted
            continue
    return found


def _is_installed(file: Path) -> bool:
    prefixes = {Path(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    own = Path(__file__).parents[2]
    return "site-packages" in file.parts or own in file.parents or any(prefix in file.parents for prefix in prefixes)


def _describe_git(folder: Path) -> dict[str, str] | None:
    """Return the commit of a folder and what differs from it; None where it is not in git."""
    folder = current_folder() / folder
    if _is_installed(folder / "file") or not any((one / ".git").exists() for one in (folder, *folder.parents)):
        return None

    def ask(*arguments: str) -> str:
        asked = ["git", "-C", str(folder), *arguments]
        return subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout

    try:
        difference = ask("diff", "HEAD", "--", ".")
        return {"commit": ask("rev-parse", "HEAD").strip(), "diff": hide_text(difference[:_LARGEST_DIFF])}
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None


@cache
def _versions() -> dict[str, str]:
    found = {"accmt": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@cache
def _name_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"
