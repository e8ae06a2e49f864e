"""The names of weight files in a model folder, and which of them a loader would read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WeightsFormat:
    """One of the two ways to write weights."""

    stem: str
    extension: str

    @property
    def single(self) -> str:
        return f"{self.stem}{self.extension}"

    @property
    def index(self) -> str:
        """Name of the file that says which shard holds which weight."""
        return f"{self.single}.index.json"

    def shard(self, digest: str, suffix: str) -> str:
        """Name of one shard; the digest keeps it apart from every other save's shards."""
        return f"{self.stem}-{digest}{suffix}{self.extension}"


SAFETENSORS = WeightsFormat("model", ".safetensors")
PICKLE = WeightsFormat("pytorch_model", ".bin")

ADAPTER_CONFIG = "adapter_config.json"
"""The file from which PEFT and transformers start where a folder holds an adapter."""

ADAPTER_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
"""The weights of an adapter, in the order in which PEFT looks for them."""

ENTRY_NAMES = (ADAPTER_CONFIG, SAFETENSORS.single, SAFETENSORS.index, PICKLE.single, PICKLE.index)
"""The files a loader starts from, in the order in which transformers looks for them: the first that exists is read."""

_OUR_SHARD = re.compile(r"(model|pytorch_model)-[0-9a-f]{16}-\d{5}-of-\d{5}\.(safetensors|bin)")


def find_entry(folder: Path) -> Path | None:
    """Return the file that a loader would start from, or None where `folder` holds no weights."""
    return next((folder / name for name in ENTRY_NAMES if (folder / name).is_file()), None)


def files_of(entry: Path) -> list[str]:
    """Return the names of the files that hold the weights of `entry`, sorted.

    A damaged index is a ValueError (no JSON) or a KeyError (no index).
    """
    if entry.name == ADAPTER_CONFIG:
        return [next((name for name in ADAPTER_NAMES if (entry.parent / name).is_file()), ADAPTER_NAMES[0])]
    if not entry.name.endswith(".json"):
        return [entry.name]
    return sorted(set(json.loads(entry.read_text(encoding="utf-8"))["weight_map"].values()))


def weight_files_in(folder: Path) -> set[str]:
    """Return the names of the files that hold weights, of whatever entry."""
    return {name for entry in ENTRY_NAMES if (folder / entry).is_file() for name in files_of(folder / entry)}


def remove_unnamed_shards(folder: Path) -> None:
    """Delete our shards that no index in `folder` names; every other file stays."""
    named = weight_files_in(folder)
    for path in folder.iterdir():
        if _OUR_SHARD.fullmatch(path.name) and path.name not in named:
            path.unlink()
