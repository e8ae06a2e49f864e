"""Trains a small network on a grid of cases and writes what each update was made of, on one process or many.

    PYTHONPATH=. torchrun --nproc-per-node 2 windows.py RESULT.json

Where the launch asks for FSDP2 or tensor parallelism it is a smaller grid.

Each sample has 1 to 5 tokens. Without weights the loss is the mean over samples; with weights it is the mean over
tokens, weighted by their number.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers.optimization  # noqa: F401
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate

import tests.many_runs  # noqa: F401
from accmt import AcceleratorModule, Callback, Trainer, read_history
from accmt.processes import gather_objects, is_main_process, num_data_processes, process_index
from accmt.sharded_tensors import make_whole
from tests.pairs import pairs
from tests.splitting import is_split, split
from tests.toys import Record

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
BATCH_SIZE = 4
TOKENS = 5
LR = 0.05
CLIP = 0.3
WARMUP = 0.3
BAD = {
    "here and there": (1, 5, 20, 28),
    "all of a batch": (1, *range(8, 12), *range(16, 24), 27),  # of one process, and of all
    "the first": tuple(range(8)),
}
OF_EACH = ("unshared", "sampler", "sampled")  # of which each process has a part of its own
COLLATED = ("dropping", "dropping-loader", "dropping-stream", "adding", "adding-loader-of-stream")


@dataclass(frozen=True)
class Case:
    """One run of the grid."""

    samples: int
    accumulation: int
    weighted: bool = False
    data: str = "sized"
    clip: float | None = None
    micro: int | None = None
    max_tokens: int | None = None
    bad: str = ""
    epochs: int = 2

    @property
    def name(self) -> str:
        values = asdict(self)
        return "-".join(f"{key}={value}" for key, value in values.items() if value != getattr(Case, key, None))


def make_sharded_cases() -> list[Case]:
    """Return those of the grid that sharded models are trained on: each kind of data, and every kind of window."""
    cases = [Case(n, a, w) for n, a in ((1, 1), (3, 2), (17, 1), (29, 4)) for w in (False, True)]
    cases += [Case(29, 2, w, data) for w in (False, True) for data in ("loader", "stream", "unshared", *COLLATED)]
    cases += [Case(29, a, w, max_tokens=9) for a in (1, 2) for w in (False, True)]
    return [*cases, Case(29, 2, micro=3), Case(29, 2, weighted=True, clip=CLIP), Case(29, 1, clip=CLIP)]


def make_cases_of_mesh(*, is_split: bool) -> list[Case]:
    """Return those of groups of groups: tensor parallelism, which has no data of each process, or hybrid sharding."""
    cases = [Case(1, 1), Case(3, 2, weighted=True), Case(29, 4, weighted=True), Case(29, 2, micro=3)]
    cases += [Case(29, 2, w, data) for w, data in ((True, "stream"), (False, "dropping"), (True, "adding"))]
    cases += [] if is_split else [Case(29, 2, w, "unshared") for w in (False, True)]
    return [*cases, Case(29, 2, weighted=True, max_tokens=9), Case(29, 1, clip=CLIP)]


def make_cases() -> list[Case]:
    """Return the grid."""
    sizes, accumulations = (1, 3, 17, 24, 29), (1, 2, 4)
    cases = [Case(n, a, w) for n, a, w in pairs(sizes, accumulations, (False, True))]
    few, is_weighted = (1, 2), (False, True)
    cases += [
        Case(n, a, w, data) for data in ("loader", "stream", "unshared") for n, a, w in pairs((3, 29), few, is_weighted)
    ]
    cases += [Case(n, a, w, data) for data in COLLATED for n, a, w in pairs((17, 29), few, is_weighted)]
    cases += [Case(24, a, w, "sampler") for a, w in pairs(few, is_weighted)]
    cases += [Case(n, a, w, micro=m) for n, a, w, m in pairs((17, 29), few, is_weighted, (1, 3))]
    cases += [Case(29, a, w, max_tokens=9) for a, w in itertools.product(few, is_weighted)]
    cut = pairs(("stream", "unshared", "adding"), (3, 29), few, is_weighted)
    cases += [Case(n, a, w, data, max_tokens=9) for data, n, a, w in cut]
    return cases + [Case(29, a, w, clip=CLIP) for a, w in pairs(few, is_weighted)]


def make_cases_with_bad_samples() -> list[Case]:
    """Return cases of which some samples cannot be read, and are skipped."""
    cases = [Case(29, a, w, bad=bad) for bad, a, w in pairs(BAD, (1, 2, 4), (False, True))]
    return cases + [Case(29, 2, data=data, bad=bad) for bad in BAD for data in ("loader", "unshared", "sampled")]


def own_samples(samples: int, process: int, processes: int) -> list[int]:
    """Return what one process has where processes have data of their own: the first has most."""
    return [i for i in range(samples) if (0 if i < samples // 2 else i % processes) == process]


def samples_of(data: str, index: int) -> list[int]:
    """Return the samples that a batch holds for one that was read for it: none, or more than one, in some cases."""
    if data.startswith("dropping"):
        return [] if index % 5 == 2 else [index]
    return [index, 1000 + index] if data.startswith("adding") and index % 3 == 0 else [index]


def make_sample(index: int) -> dict[str, torch.Tensor]:
    """Make one sample: inputs `[tokens, 3]`, targets `[tokens]`, and a mask of its real tokens."""
    generator = torch.Generator().manual_seed(index)
    length = 1 + index % TOKENS
    mask = (torch.arange(TOKENS) < length).float()
    number = torch.tensor(index)
    inputs = torch.randn(TOKENS, 3, generator=generator)
    return {
        "inputs": inputs,
        "targets": torch.randn(TOKENS, generator=generator) * (1 + index % 3),
        "mask": mask,
        "index": number,
    }


@dataclass
class CollateOthers:
    """Collates other samples than were read."""

    data: str

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return default_collate([make_sample(i) for s in samples for i in samples_of(self.data, int(s["index"]))])


def build_model() -> nn.Module:
    """Build the network, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def compute_loss(model: nn.Module, batch: dict[str, torch.Tensor], *, weighted: bool) -> tuple[torch.Tensor, float]:
    """Return the mean loss over tokens and their number, or over samples and theirs."""
    errors = (model(batch["inputs"]).squeeze(-1) - batch["targets"]).square() * batch["mask"]
    if weighted:
        tokens = batch["mask"].sum()
        return errors.sum() / tokens, float(tokens)
    return (errors.sum(1) / batch["mask"].sum(1)).mean(), float(len(errors))


class Samples(Dataset[Any]):
    """Samples with a length, of which some may not be readable."""

    def __init__(self, indices: Sequence[int], bad: str = "") -> None:
        self.indices, self.bad = indices, BAD.get(bad, ())

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.indices[index] in self.bad:
            raise KeyError(f"sample {self.indices[index]}")
        return make_sample(self.indices[index])

    def __len__(self) -> int:
        return len(self.indices)


class Stream(IterableDataset[Any]):
    """The same samples without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return (make_sample(index) for index in range(self.count))


class Regression(AcceleratorModule):
    """Returns a mean, or a mean with its weight."""

    def __init__(self, *, weighted: bool) -> None:
        if not is_split():
            self.model = build_model()
        self.weighted = weighted

    def configure_model(self) -> None:
        columns = ColwiseParallel(use_local_output=False)  # of which there are 5: processes have unequally many
        self.model = split(build_model(), {"0": columns, "2": RowwiseParallel(input_layouts=Shard(-1))})

    def length_of(self, sample: Any) -> int:
        return int(sample["mask"].sum())

    def training_step(self, batch: Any) -> Any:
        loss, weight = compute_loss(self.model, batch, weighted=self.weighted)
        return {"loss": loss, "weight": weight} if self.weighted else loss


class CountedRegression(Regression):
    """Counts the samples of a batch, where the collate function drops or adds some."""

    def get_batch_size(self, batch: Any) -> int:
        return len(batch["inputs"])


class Evaluated(Regression):
    """Returns the loss of validation batches too."""

    def validation_step(self, batch: Any) -> torch.Tensor:
        return compute_loss(self.model, batch, weighted=False)[0]


class GradientRecorder(Callback):
    """Writes down the gradient and the learning rate of each update."""

    def __init__(self) -> None:
        self.gradients: list[list[float]] = Record()
        self.learning_rates: list[float] = Record()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.gradients.append(torch.cat([make_whole(p.grad).flatten() for p in parameters]).tolist())
        self.learning_rates.append(optimizer.param_groups[0]["lr"])


def make_sampler(case: Case) -> Any:
    """Divide the samples over the processes as torch does, which gives some twice."""
    return DistributedSampler(range(case.samples), WORLD_SIZE, process_index(), shuffle=False)


def make_data(case: Case) -> Any:
    """Return the case's data in the form it asks for."""
    if case.data in ("stream", "dropping-stream"):
        return Stream(case.samples)
    if case.data == "adding-loader-of-stream":
        return DataLoader(Stream(case.samples), BATCH_SIZE, collate_fn=CollateOthers(case.data))
    if case.data == "unshared":
        return Samples(own_samples(case.samples, process_index(), WORLD_SIZE), case.bad)
    samples = Samples(range(case.samples), case.bad)
    if case.data == "sampler":
        return DataLoader(samples, BATCH_SIZE, sampler=make_sampler(case))
    collate = CollateOthers(case.data) if case.data == "dropping-loader" else None
    return DataLoader(samples, BATCH_SIZE, collate_fn=collate) if "loader" in case.data else samples


def run_case(case: Case, folder: Path, **settings: Any) -> dict[str, Any]:
    """Train one case and return what its updates were made of."""
    recorder = GradientRecorder()
    hps = {"epochs": case.epochs, "batch_size": BATCH_SIZE, "optim": {"type": "SGD", "lr": LR}}
    hps["max_micro_batch_size"], hps["max_tokens"] = case.micro, case.max_tokens
    if "stream" not in case.data and not case.bad:
        hps["scheduler"] = {"type": "LinearWithWarmup", "warmup_ratio": WARMUP}
    settings |= {"failures": {"on_bad_sample": "skip"}} if case.bad else {}
    settings |= {"sampler": make_sampler(case)} if case.data == "sampled" else {}
    trainer = Trainer(
        hps,
        folder / "model",
        model_saving=None,
        checkpoint_every=None,
        logging_dir=folder,
        grad_accumulation_steps=case.accumulation,
        shuffle_train=False,
        data_options={"shard": case.data != "unshared"},
        collate_fn=CollateOthers(case.data) if case.data in COLLATED else None,
        clip_grad=case.clip,
        callbacks=recorder,
        verbose=False,
        **settings,
    )
    kind = CountedRegression if case.data in COLLATED else Evaluated if case.bad else Regression
    module = kind(weighted=case.weighted)
    state = trainer.fit(module, make_data(case), make_data(case) if case.bad and case.data not in OF_EACH else None)
    weights = torch.cat([make_whole(p.detach()).flatten() for p in module.model.parameters()]).tolist()
    every = gather_objects((recorder.gradients, state.state_dict(), weights))
    rows = [row["values"] for row in read_history(trainer.log_dir) if "values" in row] if is_main_process() else []
    return {
        "gradients": recorder.gradients,
        "losses": [row["train_loss"] for row in rows if "train_loss" in row],
        "rows": rows,
        "state": state.state_dict(),
        "weights": weights,
        "learning_rates": recorder.learning_rates,
        "processes_agree": all(other == every[0] for other in every),
        "processes": num_data_processes(),
    }


def main() -> None:
    """Run the grid and write the results."""
    cases = (
        make_sharded_cases() if "ACCELERATE_USE_FSDP" in os.environ else [*make_cases(), *make_cases_with_bad_samples()]
    )
    if "ACCELERATE_USE_PARALLELISM_CONFIG" in os.environ:
        cases = make_cases_of_mesh(is_split=is_split())
    with tempfile.TemporaryDirectory() as folder:
        results = {case.name: run_case(case, Path(folder) / str(i)) for i, case in enumerate(cases)}
    if is_main_process():
        Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
