"""Trains and evaluates with steps that communicate, on data whose last micro-batch is short, and writes the weights.

torchrun --nproc-per-node 3 communicating_steps.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import tests.many_runs  # noqa: F401
from accmt import AcceleratorModule, Trainer, gather_with_gradients
from accmt.processes import gather_objects, is_main_process

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
GLOBAL_BATCH = 6
LR, LR_OF_DETECTION = 0.1, 1e-3
SIZES = (7, 8, 9)  # for the last batch of 3 processes: one has a sample, two have, all have


def make_rows(count: int) -> list[Tensor]:
    return list(torch.randn(count, 2, 4, generator=torch.Generator().manual_seed(count)))


class Encoders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(batch[:, 0]), self.right(batch[:, 1])


def own_rows(left: Tensor, right: Tensor, gather: Callable[[Tensor], tuple[Tensor, int]]) -> Tensor:
    """Return the loss of CLIP for this process's rows, among those of all."""
    (all_left, first), (all_right, _) = gather(left), gather(right)
    labels = first + torch.arange(len(left))
    return (
        functional.cross_entropy(left @ all_right.T, labels) + functional.cross_entropy(right @ all_left.T, labels)
    ) / 2


def all_rows(left: Tensor, right: Tensor, gather: Callable[[Tensor], tuple[Tensor, int]]) -> Tensor:
    """Return a contrastive loss of all rows, the same on each process."""
    both = torch.cat([gather(left)[0], gather(right)[0]])
    pairs, number = functional.normalize(both) @ functional.normalize(both).T / 0.5, len(both) // 2
    pairs = pairs.masked_fill(torch.eye(len(both), dtype=torch.bool), -1e9)
    return functional.cross_entropy(pairs, torch.arange(len(both)).roll(number))


LOSSES = {"own_rows": own_rows, "all_rows": all_rows}


class Contrastive(AcceleratorModule):
    def __init__(self, loss: Any) -> None:
        self.model, self.loss = Encoders(), loss

    def step(self, batch: Tensor) -> Tensor:
        return self.loss(*self.model(batch), gather_with_gradients)


class Recorded(AcceleratorModule):
    """Records how many rows each step gathers, and whether this process's are where they should be."""

    def __init__(self) -> None:
        self.model, self.seen = Encoders(), []

    def training_step(self, batch: Tensor) -> Tensor:
        own, _ = self.model(batch)
        rows, first = gather_with_gradients(own)
        self.seen.append([len(rows), torch.equal(rows[first : first + len(own)], own)])
        return own.square().mean()


class Divided(AcceleratorModule):
    """Divides by a number that is summed over processes, as other detection losses than transformers' do."""

    def __init__(self, *, late: bool = False) -> None:
        self.model, self.late, self.steps, self.counts = Encoders(), late, 0, []

    def training_step(self, batch: Tensor) -> Tensor:
        self.steps += 1
        left, right = self.model(batch)
        count = torch.tensor(float(len(batch)))
        if not self.late or self.steps > 1:
            count = self.accelerator.reduce(count)
            self.counts.append(count.item())
        return (left + right).square().sum() / count


class Reduced(AcceleratorModule):
    """Divides each of two terms by its mean number over processes, with equal weights."""

    def __init__(self) -> None:
        self.model = Encoders()

    def step(self, batch: Tensor) -> dict[str, Any]:
        left, right = self.model(batch)
        positive = (batch[:, 0, 0] > 0).float()
        counts = torch.stack([positive.sum(), torch.tensor(float(len(batch)))])
        of_positive, of_all = self.accelerator.reduce(counts, "mean")
        loss = (left.square().sum(1) * positive).sum() / of_positive.clamp(min=1e-6) + right.square().sum() / of_all
        return {"loss": loss, "weight": 1}


class Gathered(AcceleratorModule):
    """Gathers in its evaluation, as transformers' examples do."""

    def __init__(self) -> None:
        self.model, self.seen, self.objects = Encoders(), [], []

    def training_step(self, batch: Tensor) -> Tensor:
        return sum(self.model(batch)).square().mean()

    def validation_step(self, batch: Tensor) -> dict[str, Any]:
        seen = self.accelerator.gather_for_metrics({"rows": batch[:, 0, 0], "mean": batch.mean()})
        self.seen += seen["rows"].tolist()
        self.objects += self.accelerator.gather_for_metrics([f"{value:.4f}" for value in batch[:, 0, 0]])
        return {"loss": batch.mean(), "same": seen["rows"].mean()}

    def predict_step(self, batch: Tensor) -> Tensor:
        self.seen += self.accelerator.gather(batch[:, 0, 0]).tolist()
        return batch[:, 0, 0]


class Detection(AcceleratorModule):
    """Returns transformers' own loss, which divides by the boxes of all processes."""

    def __init__(self) -> None:
        self.model = make_detector()

    def step(self, batch: dict[str, Any]) -> Tensor:
        return self.model(**batch).loss


def make_detector() -> nn.Module:
    from transformers import ConditionalDetrConfig, ConditionalDetrForObjectDetection, ResNetConfig

    torch.manual_seed(0)
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
    backbone = ResNetConfig(**sizes, out_features=["stage2"])
    sizes = {name: 1 for name in ("encoder_layers", "decoder_layers")}
    sizes |= {name: 2 for name in ("encoder_attention_heads", "decoder_attention_heads")}
    sizes |= {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "num_queries": 5, "num_labels": 3, "dropout": 0}
    own = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    config = ConditionalDetrConfig(**sizes, **own, backbone_config=backbone, attention_dropout=0, activation_dropout=0)
    model = ConditionalDetrForObjectDetection(config)
    for parameter in model.parameters():  # else all queries are alike, and rounding decides which one matches a box
        if parameter.ndim == 2:
            nn.init.normal_(parameter)
    return model


def make_images() -> list[dict[str, Any]]:
    draw, images = torch.Generator().manual_seed(0), []
    for boxes in (1, 3, 2, 1, 4, 1, 2):
        labels = torch.randint(3, (boxes,), generator=draw)
        boxes_of_image = torch.rand(boxes, 4, generator=draw) * 0.4 + 0.3
        pixels = torch.randn(3, 16, 16, generator=draw)
        images.append({"pixel_values": pixels, "labels": {"class_labels": labels, "boxes": boxes_of_image}})
    return images


def collate(images: list[dict[str, Any]]) -> dict[str, Any]:
    pixels = torch.stack([image["pixel_values"] for image in images])
    return {"pixel_values": pixels, "labels": [image["labels"] for image in images]}


def fit(module: Any, folder: Path, count: int, **settings: Any) -> Any:
    lr = LR_OF_DETECTION if isinstance(module, Detection) else LR
    hps = {"epochs": 1, "batch_size": GLOBAL_BATCH // PROCESSES, "optim": {"type": "SGD", "lr": lr}}
    settings = {"model_saving": None, "shuffle_train": False, "verbose": False, "checkpoint_every": None, **settings}
    data = [make_rows(count)] if isinstance(module, Divided | Recorded) else [make_rows(count), make_rows(count)]
    data = [make_images(), make_images()] if isinstance(module, Detection) else data
    module.results = Trainer(hps, folder, logging_dir=folder, **settings).fit(module, *data).metrics
    return module


def weights_of(module: AcceleratorModule) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in module.model.parameters()]).tolist()


def main() -> None:
    """Run each case and write the results."""
    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    found: dict[str, Any] = {
        f"{name} {count}": weights_of(fit(Contrastive(loss), folder / f"{name}{count}", count))
        for name, loss in LOSSES.items()
        for count in SIZES
    }
    unused = {"find_unused_parameters": True}
    detection = fit(Detection(), folder / "detection", 7, collate_fn=collate, parallelism={"ddp": unused})
    found["detection"] = [weights_of(detection), detection.results]
    for count in SIZES:
        gathered = fit(Gathered(), folder / f"gathered{count}", count, num_sanity_val_steps=0)
        found[f"gathered {count}"] = [gathered.seen, gathered.objects, gathered.results]
    found["recorded"] = gather_objects(fit(Recorded(), folder / "recorded", 7, parallelism={"ddp": unused}).seen)
    share = GLOBAL_BATCH // PROCESSES
    unequal = make_rows(share if is_main_process() else 2 * share)  # the main process borrows
    hps = {"epochs": 1, "batch_size": share, "optim": "SGD"}
    settings = {"model_saving": None, "verbose": False, "checkpoint_every": None, "data_options": {"shard": False}}
    module = Recorded()
    Trainer(hps, folder / "unequal", logging_dir=folder, parallelism={"ddp": unused}, **settings).fit(module, unequal)
    found["unequal"] = gather_objects(module.seen)
    found["reduced"] = weights_of(fit(Reduced(), folder / "reduced", 7))
    found["divided"] = gather_objects(fit(Divided(), folder / "divided", 7).counts)
    found["late"] = gather_objects(fit(Divided(late=True), folder / "late", 7).counts)
    trainer = Trainer({"epochs": 1, "batch_size": GLOBAL_BATCH // PROCESSES, "optim": "SGD"}, folder / "predict")
    module = Gathered()
    predictions = trainer.predict(module, make_rows(7))
    found["predicted"] = [module.seen, None if predictions is None else predictions.tolist()]
    if is_main_process():
        path.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
