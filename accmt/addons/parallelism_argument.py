"""Other forms of `parallelism`: Accelerate's `ParallelismConfig`, and a dict that turns everything off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accmt.addons.hints.original import find_option
from accmt.errors import ArgumentError, fail
from accmt.options.checks import is_off


def read_parallelism(value: Any) -> Any:
    """Return the argument as options or their dict, or None for no sharding; an invalid value is returned unchanged.

    Raises:
        ArgumentError: A `ParallelismConfig` that splits sequences.
    """
    # `{"fsdp": False}` asks for no sharding, although options without `fsdp` shard.
    if isinstance(value, Mapping) and all(map(is_off, value.values())):
        return None
    if type(value).__name__ != "ParallelismConfig":  # Accelerate's, whose import takes a second
        return value
    for name in ("cp", "sp"):
        if (size := getattr(value, f"{name}_size")) > 1:
            where, expected = "Trainer(parallelism=...)", "dp_shard_size, dp_replicate_size and tp_size"
            do = str(find_option("ParallelismOptions", name))
            raise fail(ArgumentError, where, got=f"ParallelismConfig({name}_size={size})", expected=expected, do=do)
    if value.dp_shard_size == value.tp_size == 1:  # DDP
        return None
    return {"shard": value.dp_shard_size, "replicate": value.dp_replicate_size, "tp": value.tp_size}
