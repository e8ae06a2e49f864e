"""Reads a file of `accelerate config` for `accmt launch --config_file`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accmt.errors import ArgumentError, combine, fail

if TYPE_CHECKING:
    from accelerate.commands.config.config_args import ClusterConfig

_FSDP2 = "`accmt launch --strat fsdp2 train.py` without the file"
_NOT_HERE = {"DEEPSPEED": _FSDP2, "MEGATRON_LM": _FSDP2, "XLA": "`distributed_type: MULTI_GPU`"}
_REMOVED = {
    "downcast_bf16": "remove it: only TPUs use it",
    "dynamo_config": "remove it, and write Trainer(compile=True)",
    "fp8_config": "remove it, and write `mixed_precision: bf16`",
    "mpirun_config": "remove it: torchrun starts the processes",
    "tpu_name": "remove it: TPUs are not supported",
}
"""Keys that cannot be honored, and what to do."""


def apply_config(file: str, options: argparse.Namespace) -> dict[str, str]:
    """Set the options of a launch that were not typed, and return the environment that `accelerate launch` would set.

    Raises:
        ArgumentError: The file cannot be read, or it asks for what accmt does not have.
    """
    config = _read(file)
    _reject_missing(file, config)
    kind = config.distributed_type.value
    options.cpu = options.cpu or (not options.gpus and (config.use_cpu or kind == "MULTI_CPU"))
    if options.num_processes is None and not options.gpus:
        if config.num_processes > 0:
            options.num_processes = config.num_processes // config.num_machines
        if config.gpu_ids not in (None, "all") and not options.cpu:
            options.gpus = str(config.gpu_ids).replace(" ", "").split(",")
    if options.nodes == "1" and config.num_machines > 1:
        host, port = config.main_process_ip, config.main_process_port
        host = f"[{host}]" if ":" in str(host) else host
        options.nodes = str(config.num_machines)
        options.node_rank = config.machine_rank if options.node_rank is None else options.node_rank
        options.address = options.address or host and (f"{host}:{port}" if port else host)
    environment = {"ACCELERATE_MIXED_PRECISION": config.mixed_precision} if config.mixed_precision else {}
    if config.enable_cpu_affinity:
        environment["ACCELERATE_CPU_AFFINITY"] = "1"
    if config.debug:
        environment["ACCELERATE_DEBUG_MODE"] = "true"
    if kind == "FSDP":
        options.strat = options.strat or "fsdp2"
        environment |= _as_variables(config.fsdp_config or {})
    if config.parallelism_config:
        environment |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **_as_variables(config.parallelism_config)}
    return environment


def _read(file: str) -> ClusterConfig:
    import yaml
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    expected, do = "a file of `accelerate config`", f"accelerate config --config_file {file}, which writes one"
    if not Path(file).is_file():
        raise fail(ArgumentError, f"accmt launch: {file}", got="no such file", expected=expected, do=do)
    try:
        config = load_config_from_file(file)
        if not isinstance(config, ClusterConfig):
            raise TypeError("a file for SageMaker")
    except (ValueError, TypeError, AttributeError, KeyError, yaml.YAMLError) as error:
        raise fail(ArgumentError, f"accmt launch: {file}", got=str(error), expected=expected, do=do) from error
    return config


def _reject_missing(file: str, config: ClusterConfig) -> None:
    """Reject what accmt does not have, in one error."""
    kind = config.distributed_type.value
    version = str((config.fsdp_config or {}).get("fsdp_version", 1))
    faults = [(key, getattr(config, key), do) for key, do in _REMOVED.items()]
    if kind in _NOT_HERE:
        faults.append(("distributed_type", kind, f"write {_NOT_HERE[kind]}"))
    if config.mixed_precision == "fp8":
        faults.append(("mixed_precision", "fp8", "write `mixed_precision: bf16`"))
    if kind == "FSDP" and version != "2":
        do = f"run `accelerate to-fsdp2 --config_file {file} --overwrite`"
        faults.append(("fsdp_config", f"FSDP {version}", do))
    errors = []
    for key, got, do in faults:
        if got and str(got).lower() not in ("no", "false"):
            expected = "what accmt trains with"
            errors.append(fail(ArgumentError, f"{file} {key}", got=str(got), expected=expected, do=do))
    if errors:
        raise combine(ArgumentError, errors)


def _as_variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets for a section."""
    variables = {}
    for key, value in settings.items():
        if value is not None:  # one of them has another name there: FSDP_TRANSFORMER_CLS_TO_WRAP
            name = key.upper().replace("_LAYER_CLS_", "_CLS_")
            variables[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return variables
