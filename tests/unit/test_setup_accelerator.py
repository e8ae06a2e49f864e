"""Engines that are asked for: each is refused by the name of its setting, also where it would have no effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig

from tests.toys import Linear, make_points, make_trainer


@pytest.mark.parametrize(
    "environment",
    [
        {"ACCELERATE_USE_FSDP": "true"},
        {"ACCELERATE_USE_DEEPSPEED": "True"},
        {"ACCELERATE_USE_MEGATRON_LM": "true"},
        {"PARALLELISM_CONFIG_TP_SIZE": "2", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
        {"PARALLELISM_CONFIG_CP_SIZE": "4", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
    ],
    ids=lambda environment: next(iter(environment)),
)
def test_an_engine_that_a_launcher_asks_for_is_not_dropped(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NotImplementedError, match=next(iter(environment))):
        make_trainer().fit(Linear(), make_points())
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("name", "plugin"),
    [
        ("fsdp_plugin", FullyShardedDataParallelPlugin),
        ("deepspeed_plugin", object),
        ("megatron_lm_plugin", object),
        ("parallelism_config", lambda: ParallelismConfig(tp_size=2)),
    ],
)
def test_an_engine_among_the_arguments_is_not_dropped(name: str, plugin: Any) -> None:
    with pytest.raises(NotImplementedError, match=name):
        make_trainer(accelerator={"cpu": True, name: plugin()}).fit(Linear(), make_points())


def test_an_engine_of_the_users_accelerator_is_not_dropped() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
    with pytest.raises(NotImplementedError, match="tp_size=2"):
        make_trainer(accelerator=accelerator).fit(Linear(), make_points())


def test_settings_that_ask_for_ddp_are_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "")
    assert make_trainer(accelerator={"fsdp_plugin": None}).fit(Linear(), make_points()).global_step == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is used")
@pytest.mark.parametrize(
    ("cuda", "settings", "said"),
    [
        (None, {}, "this torch is built without CUDA"),
        ("13.0", {}, "update the driver"),
        (None, {"accelerator": {"cpu": True}}, ""),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_named_unless_the_cpu_was_asked_for(
    cuda, settings, said, monkeypatch, caplog, tmp_path
):
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr("accmt.setup.accelerator._DRIVER", driver)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    make_trainer(**settings, verbose=True).fit(Linear(), make_points())
    assert ("the machine has an NVIDIA GPU" in caplog.text) == bool(said)
    assert said in caplog.text
