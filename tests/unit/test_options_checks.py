"""Every check of a single Trainer argument: what is accepted, and what is said about the rest."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch

from accmt import (
    CheckpointOptions,
    Clipping,
    DataOptions,
    Failures,
    Limits,
    MetricOptions,
    ParallelismOptions,
    PatienceOptions,
    TorchFlags,
    TrackerOptions,
    Trainer,
)
from accmt.errors import AccmtError, ArgumentError
from accmt.options import Settings
from accmt.options.units import Every
from tests.raising import raises_at
from tests.toys import Linear, make_points, make_trainer

HPS = {"epochs": 1, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.1}}

WRONG = {
    "log_every": [0, -2, 1.5, 0.5, True, "1", "2 epochs"],
    "checkpoint_every": [0, 1.5, "10 parsecs"],
    "max_time": ["10 parsecs"],
    "reload_dataloaders_every_n_epochs": [-1, "2 steps"],
    "train_loss_metric_name": [""],
    "track_name": [" "],
    "run_name": [3],
    "tracker_options": [{"config": ["a"]}],
    "clip_grad": [-1, -0.5, math.nan, "1.0", "", True, {"norm": 1.0, "value": 1.0}, {"value": -1.0}],
    "grad_accumulation_steps": [0, 2.0, True, {-1: 2}, {0: 0}, {"0": 2}],
    "seed": [-1, 1.0, True],
    "mixed_precision": [16],
    "compile": ["eager", "max-autotune"],
    "parallelism": [{"ddp": [1]}, {"ddp": {}, "shard": 2}],
    "evaluate_every_n_steps": [0, -3, 0.0, 1.5, math.nan, True, "0 epochs", "2 evals"],
    "min_length": [3, "3 evals"],
    "patience": ["3 epochs"],
    "num_sanity_val_steps": [-2],
    "limit_batches": [{"train": 0}, {"train": 0.0}, 1.1, {"train": True}, math.nan, {"val": -1}],
    "dataloader_num_workers": [-1],
    "max_shard_size": ["10 foos", "10", 0, 1.5],
    "shuffle_train": ["no"],
    "safe_serialization": ["false"],
    "checkpoint": ["", Path("s3://bucket/ck")],
    "resume": [3, Path("s3://bucket/ck")],
    "checkpointer": ["a name", type("Own", (), {"save": print, "load": print})],
    "checkpoint_options": [{"max_checkpoints": 0}],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG.items() for value in values],
    ids=lambda value: str(value)[:24],
)
def test_a_value_that_cannot_be_is_refused_with_its_name(name, value):
    with raises_at(ArgumentError, f"Trainer({name}="):
        Trainer(HPS, "out", **{name: value})


@pytest.mark.parametrize("path", ["tru", "out/checkpoint-model", "run1"])
def test_a_folder_to_resume_from_is_no_misspelt_word(tmp_path, path):
    (tmp_path / "tru").mkdir()
    assert Trainer(HPS, "out", resume=path).settings.checkpoints.resume == path


ACCEPTED = [
    ("log_every", -1),
    ("clip_grad", None),
    ("clip_grad", 0),
    ("clip_grad", 1),
    ("clip_grad", math.inf),
    ("grad_accumulation_steps", {0: 1, 4: 3}),
    ("evaluate_every_n_steps", 1.0),
    ("evaluate_every_n_steps", 10**6),
    ("num_sanity_val_steps", -1),
    ("limit_batches", 1),
    ("limit_batches", 1e-9),
    ("limit_batches", Limits(val=0)),
    ("limit_batches", Limits(val=0.0)),
    ("max_shard_size", "1.5 gb"),
    ("max_shard_size", 1),
    ("seed", 0),
    ("seed", 2**70),
    ("mixed_precision", "no"),
    ("enable_progress_bar", None),
]


@pytest.mark.parametrize(("name", "value"), ACCEPTED, ids=lambda value: str(value)[:24])
def test_values_at_the_edge_are_kept_as_given(name, value):
    trainer = Trainer(HPS, "out", **{name: value})
    kept = {k: v for group in groups_of(trainer) for k, v in vars(group).items()}
    assert kept[name] == value
    assert type(kept[name]) is type(value)


def groups_of(trainer):
    return [getattr(trainer.settings, name) for name in trainer.settings.GROUPS]


def test_how_often_is_written_in_one_grammar_or_as_the_number_it_always_was():
    def settings(**arguments):
        return Trainer(HPS, "out", **arguments).settings

    for written, every in [
        (500, Every(500, "step")),
        ("500 steps", Every(500, "step")),
        (0.25, Every(0.25, "epoch")),
        ("0.25 epochs", Every(0.25, "epoch")),
        ("2 epochs", Every(2, "epoch")),
        (None, Every(1, "epoch")),
    ]:
        assert settings(evaluate_every_n_steps=written).evaluation.every == every
    assert [settings(log_every=e).tracking.log_steps for e in (10, "10 steps", -1, "epoch")] == [10, 10, -1, -1]
    for written, every in [("0.5 epochs", Every(0.5, "epoch")), (0.5, Every(0.5, "epoch")), (500, Every(500, "step"))]:
        assert settings(checkpoint_every=written).checkpoints.every == every
    assert [settings(reload_dataloaders_every_n_epochs=e).data.reload_epochs for e in (2, "2 epochs")] == [2, 2]
    assert settings(patience="3 evals").saving.patience_evaluations == 3
    assert settings(patience={"best_valid_loss": "3 evals"}).saving.patience_evaluations == {"best_valid_loss": 3}
    running = settings(min_length=["2 epochs", "100 steps"]).running
    assert (running.min_epochs, running.min_steps) == (2, 100)


@pytest.mark.parametrize(
    "path", ["", "  ", None, 3, Path("s3://bucket/model"), "s3:/bucket/model", "s3://", "hf://user/name"]
)
def test_a_model_path_that_is_no_path_and_no_url_is_refused(path):
    with raises_at(ArgumentError, "Trainer(model_path=...)"):
        Trainer(HPS, path)


@pytest.mark.parametrize(("url", "name"), [("s3://bucket/models/news/", "news"), ("gs://bucket", "bucket")])
def test_a_url_as_model_path_has_a_local_folder(url, name):
    settings = Trainer(HPS, url).settings
    assert settings.model_folder == Path("out", name)
    assert settings.checkpoint_folder == Path("out", f"checkpoint-{name}")


@pytest.mark.parametrize("path", ["out/m", Path("out/m"), "a:b", "C:/models"])
def test_a_model_path_may_be_text_or_a_path(path):
    assert Trainer(HPS, path).settings.model_folder == Path(path)


@pytest.mark.parametrize(
    ("steps", "expected"), [({4: 3, 2: 2}, [1, 1, 2, 2, 3, 3]), (None, [1] * 6), (7, [7] * 6), ({}, [1] * 6)]
)
def test_accumulation_begins_at_the_epochs_of_a_table_and_is_constant_without_one(steps, expected):
    optimization = Trainer(HPS, "out", grad_accumulation_steps=steps).settings.optimization
    assert [optimization.accumulation_at(epoch) for epoch in range(6)] == expected


def test_checkpoints_are_on_unless_the_argument_says_no():
    assert Trainer(HPS, "out").settings.checkpoints.every == Every(1, "epoch")
    assert Trainer(HPS, "out", checkpoint_every=None).settings.checkpoints.every is None


AS_OBJECTS = [
    ("failures", Failures(on_nonfinite="skip", hang_timeout_s=60), {"on_nonfinite": "skip", "hang_timeout_s": 60}),
    ("checkpoint_options", CheckpointOptions(max_previous_runs=None), {"max_previous_runs": None}),
    ("data_options", DataOptions(drop_last=True, shard=False), {"drop_last": True, "shard": False}),
    ("metric_options", MetricOptions(averages={"all": ["a"]}, gather_chunk_size=None), None),
    ("torch_flags", TorchFlags(deterministic="warn"), {"deterministic": "warn"}),
    ("tracker_options", TrackerOptions(offline=False), {"offline": False}),
    ("parallelism", ParallelismOptions(ddp={"static_graph": True}), {"ddp": {"static_graph": True}}),
    ("parallelism", ParallelismOptions(shard=2, replicate=1), {"shard": 2, "replicate": 1}),
    ("limit_batches", Limits(train=1, val=0), {"train": 1, "val": 0}),
    ("clip_grad", Clipping(value=0.5), {"value": 0.5}),
    (
        "patience",
        {"valid_loss": PatienceOptions(patience="3 evals", min_delta=0.1), "train_loss": 2},
        {"valid_loss": {"patience": "3 evals", "min_delta": 0.1}, "train_loss": 2},
    ),
]


@pytest.mark.parametrize(("name", "value", "written"), AS_OBJECTS, ids=[name for name, *_ in AS_OBJECTS])
def test_an_argument_with_parts_is_an_object_or_a_dict_of_them(name, value, written):
    trainer = Trainer(HPS, "out", **{name: value})
    written = {"averages": {"all": ["a"]}, "gather_chunk_size": None} if written is None else written
    assert trainer.config()[name] == written
    assert Trainer(HPS, "out", **{name: written}).settings == trainer.settings
    assert Trainer.from_config(trainer.config()).settings == trainer.settings
    if name != "patience":
        with pytest.raises(FrozenInstanceError):
            setattr(value, next(iter(written)), None)


@pytest.mark.parametrize("name", sorted(set(Settings.defaults()) - {"fork"}))
@pytest.mark.parametrize("value", [object(), {1: 2}])
def test_whatever_an_argument_is_an_error_about_it_names_the_argument(name, value):
    faults = []
    try:
        Trainer(HPS, "out", **{name: value})
    except AccmtError as error:
        faults += error.faults
    assert all(name in fault.where for fault in faults)


@pytest.mark.parametrize(
    "given",
    [{"compile": {"buckets": None}}, {"checkpoint_options": {"max_checkpoints": False, "max_previous_runs": False}}],
)
def test_options_that_can_be_off_are_off(given):
    settings = Trainer(HPS, "out", **given).settings
    options = settings.checkpoints.checkpoint_options
    assert settings.running.compile_buckets is None
    assert options.max_checkpoints is None
    assert options.max_previous_runs == (None if "checkpoint_options" in given else 3)


@pytest.mark.parametrize("name", ["clip_grad", "limit_batches", "overfit_batches"])
def test_a_tensor_is_no_number(name):
    with raises_at(ArgumentError, f"Trainer({name}=...)"):
        Trainer(HPS, "out", **{name: torch.tensor(1.0)})


@pytest.mark.parametrize("options", [{"mode": "fastest"}, {"backend": "inductr"}])
def test_a_mode_or_backend_that_the_compiler_does_not_have(options):
    trainer = make_trainer(compile=options)
    with raises_at(ArgumentError, f"Trainer(compile={options})"):
        trainer.fit(Linear(), make_points())
