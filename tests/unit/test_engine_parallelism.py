"""How a model is spread over processes: what is asked for runs, or is an error that names the setting."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig

from accmt import ArgumentError
from accmt.engine.parallelism import find_parallelism, require_effect
from accmt.options import RunningSettings
from tests.raising import raises_at
from tests.toys import Linear, make_points, make_trainer

ZERO = "ZeRO 3 is the default"
FSDP = 'Trainer(parallelism={"fsdp": True})'


@pytest.mark.parametrize(
    ("environment", "do"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "--fsdp_version 2"),
        ({"ACCELERATE_USE_DEEPSPEED": "True"}, ZERO),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, FSDP),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}, "-N 2"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "4"}, "leave them out"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, "-N 2"),
    ],
    ids=lambda value: [*value][-1] if isinstance(value, dict) else "",
)
def test_an_engine_that_a_launcher_asks_for_is_not_dropped(
    environment: Any, do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with raises_at(ArgumentError, "the parallelism") as raised:
        make_trainer().fit(Linear(), make_points())
    monkeypatch.undo()
    assert do in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "do"),
    [
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)}, "--fsdp_version 2"),
        ({"deepspeed_plugin": object()}, ZERO),
        ({"megatron_lm_plugin": object()}, FSDP),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, "-N 2"),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, "leave them out"),
        ({"parallelism_config": ParallelismConfig(dp_shard_size=2)}, "-N 2"),
    ],
    ids=lambda value: [*value][0] if isinstance(value, dict) else "",
)
def test_an_engine_among_the_arguments_is_not_dropped(arguments: Any, do: str) -> None:
    with raises_at(ArgumentError, "the parallelism") as raised:
        make_trainer(accelerator=arguments).fit(Linear(), make_points())
    assert do in str(raised.value)


def test_an_engine_of_the_users_accelerator_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.deepspeed_plugins = {"": object()}
    with raises_at(ArgumentError, "the parallelism"):
        make_trainer(accelerator=accelerator).fit(Linear(), make_points())


def test_settings_that_ask_for_ddp_are_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "false")
    assert make_trainer(accelerator={"fsdp_plugin": None}).fit(Linear(), make_points()).global_step == 4


def test_a_process_that_is_alone_has_the_whole_model() -> None:
    state = make_trainer(parallelism={"fsdp": {"reshard_after_forward": False}}).fit(Linear(), make_points())
    assert state.global_step == 4


@pytest.fixture
def eight_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "8")
        yield


@pytest.mark.parametrize(
    ("parallelism", "shard", "replicate"),
    [
        ({"fsdp": True}, None, None),
        ({"replicate": 2}, 4, 2),
        ({"shard": 2, "replicate": 4}, 2, 4),
        ({"shard": 8}, 8, 1),
    ],
)
def test_the_sizes_of_the_mesh_are_those_of_the_launch(
    parallelism: Any, shard: int | None, replicate: int | None, eight_processes: None
) -> None:
    found = find_parallelism(RunningSettings(parallelism=parallelism))
    assert found.plugin is not None
    assert found.plugin.fsdp_version == 2
    config = found.config
    assert (None if config is None else config.dp_shard_size) == shard
    assert (None if config is None else config.dp_replicate_size) == replicate


@pytest.mark.parametrize(
    ("parallelism", "shard", "replicate"),
    [({"tp": 8}, 1, 1), ({"tp": 2}, 4, 1), ({"tp": 2, "shard": 4}, 4, 1), ({"tp": 2, "replicate": 2}, 2, 2)],
)
def test_what_tensor_parallelism_leaves_of_the_processes_shards(
    parallelism: Any, shard: int, replicate: int, eight_processes: None
) -> None:
    found = find_parallelism(RunningSettings(parallelism=parallelism))
    assert found.config is not None
    assert (found.config.dp_shard_size, found.config.dp_replicate_size) == (shard, replicate)
    assert found.config.tp_size == parallelism["tp"]
    assert (found.plugin is None) == (shard == 1)


@pytest.mark.parametrize(
    ("parallelism", "got"),
    [
        ({"tp": 4, "replicate": 2}, "with DDP"),
        ({"tp": 8, "fsdp": {"cpu_offload": True}}, "no processes to shard over"),
        ({"tp": 3}, "1 x 2 x 3, on 8 processes"),
    ],
)
def test_a_mesh_of_tensor_parallelism_that_cannot_be_is_an_error(
    parallelism: Any, got: str, eight_processes: None
) -> None:
    with raises_at(ArgumentError, "the parallelism", got):
        find_parallelism(RunningSettings(parallelism=parallelism))


def test_copies_of_a_split_model_that_a_launch_asks_for_are_an_error(
    eight_processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate checks the sizes when a configuration is made, not those that are set later."""
    config = ParallelismConfig(tp_size=4)
    config._set_size("dp_replicate", 2)
    with raises_at(ArgumentError, "the parallelism"):
        find_parallelism(RunningSettings(accelerator={"parallelism_config": config}))


@pytest.mark.parametrize(
    ("first", "second"),
    [({"shard": 8}, {"shard": 2, "replicate": 4}), ({"shard": 4, "replicate": 2}, {"fsdp": True}), ({}, {"shard": 8})],
)
def test_a_second_trainer_has_the_groups_that_it_asks_for(
    first: Any, second: Any, eight_processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs Accelerate keeps those of the first one in a program."""
    monkeypatch.setattr(ParallelismConfig, "get_device_mesh", lambda config, device: (device, config.dp_shard_size))
    before, after = (find_parallelism(RunningSettings(parallelism=asked)) for asked in (first, second))
    state = SimpleNamespace(
        fsdp_plugin=before.plugin, parallelism_config=before.config, device_mesh="of the first", distributed_type=None
    )
    kind = SimpleNamespace(value="FSDP")
    accelerator: Any = SimpleNamespace(
        is_fsdp2=True,
        num_processes=8,
        state=state,
        distributed_type=kind,
        device=torch.device("cuda"),
        mixed_precision="bf16",
    )
    require_effect(accelerator, after)
    assert after.plugin is not None
    assert after.plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    expected = None if after.config is None else ("cuda", after.config.dp_shard_size)
    assert (state.fsdp_plugin, state.parallelism_config, state.device_mesh) == (after.plugin, after.config, expected)


def test_the_engine_is_asked_for_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with raises_at(ArgumentError, "the parallelism"):
        find_parallelism(RunningSettings(parallelism={"fsdp": True}))
