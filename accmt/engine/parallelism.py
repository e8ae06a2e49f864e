"""How a model is distributed over processes: reads launch, environment and Trainer, and checks the result.

DDP is Accelerate's default. FSDP2 and hybrid sharding are enabled by `Trainer(parallelism=...)`, by
`accelerate launch --use_fsdp --fsdp_version 2`, or by an Accelerator's plugin and `ParallelismConfig`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from accmt.engine.tensor_parallel import config_of
from accmt.errors import ArgumentError, fail
from accmt.libraries.private_names import use_fsdp
from accmt.libraries.versions import parallel_size
from accmt.options import RunningSettings
from accmt.options.running import ParallelismOptions

if TYPE_CHECKING:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig

_TRUE = ("true", "1", "yes")
_USE_FSDP, _USE_CONFIG = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"
_SIZES = {"replicate": "dp_replicate_size", "shard": "dp_shard_size", "tp": "tp_size"}
_WHERE = "the parallelism"
_FSDP2 = 'Trainer(parallelism={"fsdp": True})'
_SETTINGS_OF_ZERO = (
    "ZeRO 1 and 2 are reshard_after_forward=False, ZeRO 3 is the default, offloading is cpu_offload=True: "
    'Trainer(parallelism={"fsdp": {...}})'
)
# Unsupported engines: the flag of a launch, the arguments of an Accelerator, and what to use instead.
_NOT_BUILT = {
    "DeepSpeed": ("ACCELERATE_USE_DEEPSPEED", ("deepspeed_plugin", "deepspeed_plugins"), _SETTINGS_OF_ZERO),
    "Megatron-LM": ("ACCELERATE_USE_MEGATRON_LM", ("megatron_lm_plugin",), f"FSDP2: {_FSDP2}"),
}
_SHARDING = ("fsdp_plugin", "parallelism_config")
_ARGUMENTS = (*_SHARDING, *chain.from_iterable(names for _, names, _ in _NOT_BUILT.values()))


@dataclass(frozen=True)
class Parallelism:
    """The requested parallelism.

    Attributes:
        plugin: The settings of FSDP2; None if the model is not sharded.
        config: The sizes of the device mesh; None if it has only one dimension.
        source: The setting that requested it.
    """

    plugin: FullyShardedDataParallelPlugin | None = None
    config: ParallelismConfig | None = None
    source: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether nothing is requested: one process, or DDP."""
        return self.plugin is None and self.config is None


def find_parallelism(settings: RunningSettings) -> Parallelism:
    """Return the parallelism requested by the Trainer's argument, the Accelerator's arguments, or else the launch.

    A single process always has the whole model.

    Raises:
        ArgumentError: The engine is not supported, or it is FSDP version 1.
    """
    user = settings.accelerator or {}
    if not isinstance(user, Mapping):
        user = {name: getattr(user.state, name, None) for name in _ARGUMENTS}
    for engine, (flag, arguments, do) in _NOT_BUILT.items():
        requests = []
        if is_set(flag):
            requests.append(f"{flag}={os.environ[flag]}")
        for name in arguments:
            if user.get(name) is not None:
                requests.append(f"Accelerator({name}=...)")
        if requests:  # the Accelerator would otherwise train with it, without accmt's windows and checkpoints
            _reject(f"{', '.join(requests)}: accmt does not train with {engine}", "DDP, or FSDP2", do)
    if settings.parallelism and settings.parallelism.engine:
        requested = Parallelism()  # an engine of another package spreads the model itself
    elif settings.parallelism and settings.parallelism.ddp is None:
        duplicates = []
        for name in _SHARDING:
            if user.get(name) is not None:
                duplicates.append(f"Accelerator({name}=...)")
        for name in filter(is_set, (_USE_FSDP, _USE_CONFIG)):
            duplicates.append(f"{name}={os.environ[name]}")
        # Without this, the settings of the launch would be ignored silently.
        if duplicates:
            _reject(f"parallelism=... and {', '.join(duplicates)}", "one of them", f"leave one out: {_FSDP2}")
        requested = _of_argument(settings.parallelism)
    else:
        requested = _of_launch(user)
    _check_sizes(requested)
    return requested if _num_launched() > 1 else Parallelism()


def accelerator_arguments(parallelism: Parallelism) -> dict[str, Any]:
    """Return the arguments of an Accelerator on GPUs, which handles the rest."""
    if parallelism.is_plain:
        return {}
    return {"fsdp_plugin": parallelism.plugin, "parallelism_config": parallelism.config}


@contextmanager
def hidden_from_accelerate() -> Iterator[None]:
    """Hide a launch's settings while an Accelerator of CPU processes is built: it would reject or drop them.

    Source: `Accelerator.__init__` in accelerate/accelerator.py of Accelerate 1.15, which reads them.
    """
    hidden = {}
    for name in (_USE_FSDP, _USE_CONFIG):
        if name in os.environ:
            hidden[name] = os.environ.pop(name)
    try:
        yield
    finally:
        os.environ.update(hidden)


def shard_on_cpu(accelerator: Accelerator, parallelism: Parallelism) -> None:
    """Let an Accelerator of CPU processes distribute models; afterwards Accelerate's own code works as on GPUs."""
    if parallelism.plugin is not None:
        use_fsdp(accelerator, parallelism.plugin)
    _use_mesh(accelerator, parallelism.config)


def forget_mesh_of_cpus() -> None:
    """Make Accelerate forget the CPU process groups of a previous Trainer, which a new Accelerator would reject."""
    from accelerate.state import AcceleratorState, is_initialized

    if is_initialized() and AcceleratorState().device.type == "cpu":
        AcceleratorState().parallelism_config = None


def require_effect(accelerator: Accelerator, parallelism: Parallelism) -> None:
    """Check that this Accelerator does what was requested.

    Raises:
        ArgumentError: It does something else, or something unsupported.
    """
    kind = accelerator.distributed_type.value
    # An Accelerator that the program has built with a plugin; `find_parallelism` sees only arguments and launches.
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        do = _FSDP2
        if kind == "DEEPSPEED":
            do = _SETTINGS_OF_ZERO
        _reject(f"an Accelerator that runs {kind}", "DDP, or FSDP2", do)
    is_requested = parallelism.plugin is not None or is_set(_USE_FSDP)
    # As with an Accelerator that was built with cpu=True: Accelerate drops the plugin, and trains replicas.
    if is_requested and accelerator.num_processes > 1 and not accelerator.is_fsdp2:
        got = f"{parallelism.source or _USE_FSDP} requests FSDP, but this Accelerator runs {kind}"
        _reject(got, "FSDP2, as requested", f"let the Trainer build the Accelerator: {_FSDP2}")
    # Accelerate's shared state outlives a Trainer: the second one would shard without being asked to.
    if accelerator.is_fsdp2 and not is_requested:
        got = "a Trainer without `parallelism` after one that shards: Accelerate has one engine per program"
        _reject(got, "the same engine for every Trainer of a program", f"pass it to each: {_FSDP2}")
    if accelerator.is_fsdp2:
        if parallelism.plugin is not None:
            if accelerator.mixed_precision != "no":
                parallelism.plugin.set_mixed_precision(accelerator.mixed_precision)
            accelerator.state.fsdp_plugin = parallelism.plugin  # Accelerate would keep the first Trainer's
            if _mesh_of(accelerator.state.parallelism_config) != _mesh_of(parallelism.config):
                _use_mesh(accelerator, parallelism.config)
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # Reduce gradients in float32, as data parallelism does, unless the user has chosen another policy.
        # Accelerate's policy for bf16 reduces them in bf16, which rounds each process's part to 8 bits.
        plugin: Any = accelerator.state.fsdp_plugin
        policy = plugin.mixed_precision_policy
        if policy is not None and policy.param_dtype == policy.reduce_dtype == policy.output_dtype:
            in_float32 = MixedPrecisionPolicy(param_dtype=policy.param_dtype, reduce_dtype=torch.float32)
            plugin.mixed_precision_policy = in_float32
    elif _mesh_of(config_of(accelerator)) != _mesh_of(parallelism.config):
        _use_mesh(accelerator, parallelism.config)


def _use_mesh(accelerator: Accelerator, config: ParallelismConfig | None) -> None:
    """Set the Accelerator's process groups to this Trainer's; its state may contain a previous Trainer's."""
    accelerator.state.parallelism_config = config
    accelerator.state.device_mesh = None
    if config is not None:
        accelerator.state.device_mesh = config.get_device_mesh(accelerator.device.type)


def _mesh_of(config: ParallelismConfig | None) -> tuple[int, int, int] | None:
    if config is None:
        return None
    return config.dp_replicate_size, config.dp_shard_size, parallel_size(config, "tp")


def _of_argument(requested: ParallelismOptions) -> Parallelism:
    from accelerate.parallelism_config import ParallelismConfig

    source = f"Trainer(parallelism={requested.to_dict()!r})"
    sizes: dict[str, Any] = {}
    for name, size_name in _SIZES.items():
        size = getattr(requested, name)
        if size is not None:
            sizes[size_name] = size
    if not sizes:
        return Parallelism(_make_plugin(requested.fsdp), None, source)
    sizes = {"dp_replicate_size": 1, "tp_size": 1} | sizes
    sizes.setdefault("dp_shard_size", max(1, _num_launched() // (sizes["dp_replicate_size"] * sizes["tp_size"])))
    _reject_copies_of_split(source, sizes)
    is_split_only = sizes["tp_size"] > 1 and sizes["dp_shard_size"] == 1
    # They would be ignored.
    if is_split_only and isinstance(requested.fsdp, Mapping):
        got = f"{source}: settings of FSDP2, but no processes to shard over: tp is {sizes['tp_size']}"
        _reject(got, "processes for FSDP2 in addition to tensor parallelism", 'more processes, or leave "fsdp" out')
    plugin = None
    if not is_split_only:
        plugin = _make_plugin(requested.fsdp)
    return Parallelism(plugin, ParallelismConfig(**sizes), source)


def _make_plugin(settings: Any) -> FullyShardedDataParallelPlugin:
    from accelerate import FullyShardedDataParallelPlugin

    arguments: dict[str, Any] = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}
    if isinstance(settings, Mapping):  # otherwise `True`, or None where only sizes are set
        arguments |= settings
    return FullyShardedDataParallelPlugin(**arguments)


def _reject_copies_of_split(source: str, sizes: Mapping[str, int]) -> None:
    """Reject replicas of a model that is split by tensor parallelism: Accelerate does not support them."""
    if sizes["dp_replicate_size"] > 1 and sizes["tp_size"] > 1 and sizes["dp_shard_size"] == 1:
        got = f"{source}: tensor parallelism with DDP"
        _reject(got, "tensor parallelism alone or with FSDP2", 'leave "replicate" out: the other processes then shard')


def _of_launch(user: Mapping[str, Any]) -> Parallelism:
    plugin, config = user.get("fsdp_plugin"), user.get("parallelism_config")
    sources = [f"Accelerator({name}=...)" for name in _SHARDING if user.get(name)]
    if plugin is None and is_set(_USE_FSDP):  # an Accelerator with a plugin sets it too
        from accelerate import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin()  # reads the environment
        sources.append(f"{_USE_FSDP}={os.environ[_USE_FSDP]}")
    if config is None and is_set(_USE_CONFIG):
        from accelerate.parallelism_config import ParallelismConfig

        config = ParallelismConfig()
        sources.append(f"{_USE_CONFIG}={os.environ[_USE_CONFIG]}")
    if config is not None and config.total_size == 1:
        config = None
    return Parallelism(plugin, config, ", ".join(sources))


def is_set(name: str) -> bool:
    """Return whether an environment variable is set to a true value."""
    return os.environ.get(name, "").lower() in _TRUE


def _num_launched() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def _check_sizes(requested: Parallelism) -> None:
    plugin, config = requested.plugin, requested.config
    # FSDP version 1 flattens parameters: names, clipping and checkpoints would be of the flat ones.
    if plugin is not None and plugin.fsdp_version != 2:
        do = f"--fsdp_version 2 at the launch, or {_FSDP2}"
        _reject(f"{requested.source}: version {plugin.fsdp_version} of FSDP", "FSDP2, which replaces it", do)
    if config is None:
        return
    unsupported = []
    for name in ("cp", "sp"):
        if parallel_size(config, name) > 1:
            unsupported.append(f"{name}_size={parallel_size(config, name)}")
    if unsupported:  # these split each sample over processes, which the weights of batches do not know
        expected = "shard, replicate and tp: context and sequence parallelism are not supported"
        _reject(f"{requested.source}: {', '.join(unsupported)}", expected, f"leave them out: {_FSDP2}")
    replicate, shard, tp = config.dp_replicate_size, config.dp_shard_size, parallel_size(config, "tp")
    # A smaller mesh would leave processes without a place in it.
    if config.total_size != _num_launched():
        got = f"replicate x shard x tp = {replicate} x {shard} x {tp}, on {_num_launched()} processes"
        do = f"accmt launch -N {config.total_size}, or sizes whose product is {_num_launched()}"
        _reject(got, "as many processes as the mesh has", do)
    _reject_copies_of_split(requested.source, {"dp_replicate_size": replicate, "dp_shard_size": shard, "tp_size": tp})
    # Nothing would use the sizes: the processes would train whole replicas.
    if plugin is None and max(replicate, shard) > 1:
        got = f"{requested.source}, without FSDP2, which would shard"
        _reject(got, "FSDP2 together with the sizes of its mesh", _FSDP2)


def _reject(got: str, expected: str, do: str) -> NoReturn:
    raise fail(ArgumentError, _WHERE, got=got, expected=expected, do=do)
