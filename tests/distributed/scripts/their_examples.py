"""Trains the examples of examples/well-known-scripts.md, as the page has them; writes losses.

PYTHONPATH=. torchrun --nproc-per-node 2 their_examples.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

import tests.many_runs  # noqa: F401
from accmt import Trainer, read_history
from accmt.metrics import Metric
from accmt.processes import is_main_process
from tests.e2e.markdown import ROOT, read_blocks

PAGE = ROOT / "examples" / "well-known-scripts.md"
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
BATCH, SAMPLES, RATE = 4, 11, 0.1  # of all processes
VOCABULARY, PAD, END = 20, 0, 2
Row = dict[str, Any] | tuple[Any, ...]


def read_page() -> dict[str, Any]:
    """Run the modules of the page, and return them by name."""
    names: dict[str, Any] = {"__name__": "their_examples"}
    for block in read_blocks(PAGE, "python"):
        if block.is_run:
            exec(compile(block.text, PAGE.name, "exec"), names)  # noqa: S102 - the page is ours
    return names


@dataclass(frozen=True)
class Example:
    """A program of others, in miniature.

    Attributes:
        title: The heading of the page under which it stands.
        make_model: Makes the model; called with torch seeded.
        make_row: Makes one sample.
        collate: Makes a batch.
        build: Makes the module of the page of the model.
        loss: The loss of one batch, as the original computes it on one process.
        accumulation: Micro-batches of a step.
        metric: What the validation step returns beside the loss.
        rate: The learning rate.
    """

    title: str
    make_model: Callable[[], nn.Module]
    make_row: Callable[[torch.Generator], Any]
    collate: Callable[[list[Any]], Any]
    build: Callable[[dict[str, Any], nn.Module], Any]
    loss: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(**batch).loss
    accumulation: int = 1
    metric: str | None = None
    rate: float = RATE

    def rows(self) -> list[Any]:
        rng = torch.Generator().manual_seed(1)
        return [self.make_row(rng) for _ in range(SAMPLES * self.accumulation)]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make_model()


class Kept(Metric):
    """Keeps what the original's metric would get."""

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {self.name: float(len(predictions) == len(references) == SAMPLES)}


# How an example is trained


def in_plain_torch(example: Example) -> list[float]:
    """Return the losses of one process that puts the batches of all through the model at once."""
    model, rows, losses = example.model().train(), example.rows(), []
    optimizer = torch.optim.SGD(model.parameters(), example.rate)
    size = BATCH * example.accumulation
    for first in range(0, len(rows), size):
        loss = example.loss(model, example.collate(rows[first : first + size]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(example: Example, folder: Path) -> list[float]:
    """Return the losses that the Trainer logs."""
    hps = {"epochs": 1, "batch_size": BATCH // PROCESSES, "optim": {"type": "SGD", "lr": example.rate}}
    metrics = Kept(example.metric, greater_is_better=True) if example.metric else None
    trainer = Trainer(
        hps,
        folder / example.title / "model",
        logging_dir=folder / "logs",
        collate_fn=example.collate,
        grad_accumulation_steps=example.accumulation,
        metrics=metrics,
        model_saving=None,
        checkpoint_every=None,
        shuffle_train=False,
        num_sanity_val_steps=0,
        verbose=False,
        seed=0,
    )
    rows, module = example.rows(), example.build(read_page(), example.model())
    state = trainer.fit(module, rows, rows[:SAMPLES] if example.metric else None)
    assert not example.metric or state.metrics[example.metric] == 1.0
    if not trainer.is_main:
        return []
    values = [row.get("values", {}) for row in read_history(trainer.log_dir)]
    return [row["train_loss"] for row in values if "train_loss" in row]


# The models, samples and losses of the originals


def tokens(rng: torch.Generator, least: int = 2, most: int = 8) -> Tensor:
    return torch.randint(3, VOCABULARY, (int(torch.randint(least, most + 1, (), generator=rng)),), generator=rng)


def padded(samples: list[Any], name: str, value: float = PAD) -> Tensor:
    return pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=value)


def stacked(samples: list[Any], name: str) -> Tensor:
    return torch.stack([sample[name] for sample in samples])


def ended(ids: Tensor) -> Tensor:
    return torch.cat([ids, torch.tensor([END])])


def masked(samples: list[Any]) -> dict[str, Tensor]:
    ids = padded(samples, "input_ids")
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


SMALL: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8}
OFF = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
BERT: dict[str, Any] = {"vocab_size": VOCABULARY, **SMALL, **OFF}
HALF = {"layers": 1, "ffn_dim": 8, "attention_heads": 2}
SEQ2SEQ: dict[str, Any] = {f"encoder_{name}": size for name, size in HALF.items()}
SEQ2SEQ |= {f"decoder_{name}": size for name, size in HALF.items()} | {"d_model": 8, "dropout": 0.0}
TEXTS = {
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": END,
    "decoder_start_token_id": 1,
    "vocab_size": VOCABULARY,
}


def make_question(rng: torch.Generator) -> Row:
    ids = tokens(rng)  # all padded to one length, as run_qa.py does: the loss sees the padding
    return {
        "input_ids": functional.pad(ids, (0, 8 - len(ids))),
        "start_positions": torch.tensor(0),
        "end_positions": torch.tensor(len(ids) - 1),
    }


def collate_questions(samples: list[Any]) -> dict[str, Tensor]:
    return {**masked(samples), **{name: stacked(samples, name) for name in samples[0] if "pos" in name}}


def make_detr() -> nn.Module:
    backbone = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic", out_features=["stage1"]
    )
    own = {"backbone_config": backbone, "use_timm_backbone": False, "num_queries": 4, "num_labels": 3}
    return transformers.DetrForObjectDetection(transformers.DetrConfig(**SEQ2SEQ, **own))


def make_image(rng: torch.Generator) -> Row:
    boxes = torch.rand(2, 4, generator=rng) * 0.4 + 0.1
    labels = torch.randint(0, 3, (2,), generator=rng)
    return {"pixel_values": torch.randn(3, 16, 16, generator=rng), "labels": {"class_labels": labels, "boxes": boxes}}


def collate_images(samples: list[Any]) -> dict[str, Any]:
    return {"pixel_values": stacked(samples, "pixel_values"), "labels": [sample["labels"] for sample in samples]}


def make_wav2vec() -> nn.Module:
    off = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
    config = transformers.Wav2Vec2Config(
        **SMALL,
        vocab_size=VOCABULARY,
        conv_dim=(4, 4),
        conv_stride=(4, 2),
        conv_kernel=(4, 2),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
        mask_time_prob=0.0,
        layerdrop=0.0,
        ctc_loss_reduction="mean",
        **dict.fromkeys(off, 0.0),
    )
    return transformers.Wav2Vec2ForCTC(config)


def make_utterance(rng: torch.Generator) -> Row:
    return {"input_values": torch.randn(200, generator=rng), "labels": tokens(rng, 2, 6)}


def collate_sounds(samples: list[Any], name: str) -> dict[str, Tensor]:
    return {name: stacked(samples, name), "labels": padded(samples, "labels", -100)}


def make_clip() -> nn.Module:
    texts = {**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": 8, "eos_token_id": END}
    images = {**SMALL, "image_size": 8, "patch_size": 4}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=texts, vision_config=images, projection_dim=8))


def make_pair(rng: torch.Generator) -> Row:
    return {"input_ids": ended(tokens(rng, 5, 5)), "pixel_values": torch.randn(3, 8, 8, generator=rng)}


def contrast(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


def make_comparison(rng: torch.Generator) -> Row:
    return {"chosen": tokens(rng), "rejected": tokens(rng)}


def collate_comparisons(samples: list[Any]) -> dict[str, Tensor]:
    ids = {name: padded(samples, name) for name in ("chosen", "rejected")}
    return {**ids, **{f"{name}_mask": (value != PAD).long() for name, value in ids.items()}}


def reward(model: nn.Module, batch: Any) -> Tensor:
    chosen, rejected = (
        model(input_ids=batch[name], attention_mask=batch[f"{name}_mask"]).logits for name in ("chosen", "rejected")
    )
    return -functional.logsigmoid(chosen - rejected).mean()


def make_gpt() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off, bos_token_id=1, eos_token_id=END))


def make_reference() -> nn.Module:
    torch.manual_seed(5)
    return make_gpt().requires_grad_(requires_grad=False)


def collate_preferences(samples: list[Any]) -> dict[str, dict[str, Tensor]]:
    longest = max(len(ids) for sample in samples for ids in sample.values())
    batch = {}
    for name in ("chosen", "rejected"):
        ids = padded(samples, name)
        ids = functional.pad(ids, (0, longest - ids.shape[1]), value=PAD)
        batch[name] = {"input_ids": ids, "labels": ids.masked_fill(ids == PAD, -100)}
    return batch


def prefer(model: nn.Module, batch: Any) -> Tensor:
    log_probabilities, reference = read_page()["log_probabilities"], make_reference()
    policy = log_probabilities(model, batch)
    chosen, rejected = (policy - log_probabilities(reference, batch)).chunk(2)
    return -functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def make_text(rng: torch.Generator) -> Row:
    return {"input_ids": tokens(rng, 2, 12)}


def collate_texts(samples: list[Any]) -> dict[str, Tensor]:
    batch = masked(samples)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["input_ids"] == PAD, -100)}


def make_whisper() -> nn.Module:
    off: dict[str, Any] = dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"))
    config = transformers.WhisperConfig(
        **SEQ2SEQ, **TEXTS, num_mel_bins=4, max_source_positions=10, max_target_positions=16, **off
    )
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    return model


def make_speech(rng: torch.Generator) -> Row:
    return {"input_features": torch.randn(4, 20, generator=rng), "labels": ended(tokens(rng))}


def make_marian() -> nn.Module:
    return transformers.MarianMTModel(transformers.MarianConfig(**SEQ2SEQ, **TEXTS, max_position_embeddings=24))


def make_sentence(rng: torch.Generator) -> Row:
    return {"input_ids": tokens(rng), "labels": ended(tokens(rng))}


def collate_sentences(samples: list[Any]) -> dict[str, Tensor]:
    return {**masked(samples), "labels": padded(samples, "labels", -100)}


def smooth(model: nn.Module, batch: Any) -> Tensor:
    logits = model(**batch).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)


def make_forecaster() -> nn.Module:
    series = {"prediction_length": 4, "context_length": 6, "lags_sequence": [1], "num_time_features": 1}
    off = dict.fromkeys(("attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop"), 0.0)
    own: dict[str, Any] = {**SEQ2SEQ, **series, **off, "scaling": None, "num_parallel_samples": 3}
    return transformers.TimeSeriesTransformerForPrediction(transformers.TimeSeriesTransformerConfig(**own))


def make_series(rng: torch.Generator) -> Row:
    observed = (torch.arange(4) < int(torch.randint(1, 5, (), generator=rng))).float()
    return {
        "past_values": torch.randn(7, generator=rng),
        "past_time_features": torch.arange(7.0)[:, None] / 7,
        "past_observed_mask": torch.ones(7),
        "future_values": torch.randn(4, generator=rng) * observed,
        "future_time_features": torch.arange(7.0, 11.0)[:, None] / 7,
        "future_observed_mask": observed,
    }


def make_detector() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.SiLU(), nn.Conv2d(4, 8, 1))


def make_scene(rng: torch.Generator) -> Row:
    number = int(torch.randint(0, 4, (), generator=rng))
    classes = torch.randint(0, 3, (number, 1), generator=rng).float()
    return torch.randn(3, 8, 8, generator=rng), torch.cat([classes, torch.rand(number, 4, generator=rng) * 0.9], 1)


def collate_scenes(samples: list[Any]) -> tuple[Tensor, Tensor]:
    targets = [functional.pad(sample[1], (1, 0), value=float(number)) for number, sample in enumerate(samples)]
    return torch.stack([sample[0] for sample in samples]), torch.cat(targets)


def sum_losses(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of the boxes and of the classes, summed over targets, and that of the cells, over images."""
    cells = predictions.permute(0, 2, 3, 1)
    image, column, row = targets[:, 0].long(), (targets[:, 2] * 2).long(), (targets[:, 3] * 2).long()
    of_targets = cells[image, row, column]
    box = (of_targets[:, :4].sigmoid() - targets[:, 2:]).abs().sum()
    one_hot = functional.one_hot(targets[:, 1].long(), 3).float()
    cls = functional.binary_cross_entropy_with_logits(of_targets[:, 5:], one_hot, reduction="none").mean(1).sum()
    is_object = torch.zeros(cells.shape[:3])
    is_object[image, row, column] = 1.0
    objectness = functional.binary_cross_entropy_with_logits(cells[..., 4], is_object, reduction="none")
    return box, cls, objectness.mean((1, 2)).sum()


def detect(model: nn.Module, batch: Any) -> Tensor:
    images, targets = batch
    box, cls, objectness = sum_losses(model(images), targets)
    return (5 * box + cls) / max(len(targets), 1) + objectness / len(images)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(VOCABULARY, 8, padding_idx=PAD)
        self.query, self.item = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, history: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        return self.query(self.embedding(history)), self.item(self.embedding(item[:, None]))


LOG_Q = torch.linspace(-3.0, -1.0, VOCABULARY)


def make_visit(rng: torch.Generator) -> Row:
    return {"history": tokens(rng), "item": tokens(rng, 1, 1)[0]}


def collate_visits(samples: list[Any]) -> dict[str, Tensor]:
    return {"history": padded(samples, "history"), "item": stacked(samples, "item")}


def retrieve(model: nn.Module, batch: Any) -> Tensor:
    queries, items = model(batch["history"], batch["item"])
    return functional.cross_entropy(queries @ items.T - LOG_Q[batch["item"]], torch.arange(len(queries)))


class RotatE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entities, self.relations = nn.Embedding(VOCABULARY, 8), nn.Embedding(3, 4)

    def forward(self, triple: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
        head, relation, tail = self.entities(triple[:, 0]), self.relations(triple[:, 1]), self.entities(triple[:, 2])
        return self.score(head, relation, tail), self.score(head[:, None], relation[:, None], self.entities(negatives))

    def score(self, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        (real, imaginary), (real_tail, imaginary_tail) = head.chunk(2, -1), tail.chunk(2, -1)
        cosine, sine = relation.cos(), relation.sin()
        apart = (real * cosine - imaginary * sine - real_tail, real * sine + imaginary * cosine - imaginary_tail)
        return 4.0 - torch.stack(apart).norm(dim=0).sum(-1)


def make_triple(rng: torch.Generator) -> Row:
    return {
        "triple": torch.randint(0, 3, (3,), generator=rng),
        "negatives": torch.randint(0, VOCABULARY, (4,), generator=rng),
        "weight": torch.rand((), generator=rng) + 0.1,
    }


def embed_graph(model: nn.Module, batch: Any) -> Tensor:
    positive, negative = model(batch["triple"], batch["negatives"])
    negative = (negative.softmax(1).detach() * functional.logsigmoid(-negative)).sum(1)
    weights = batch["weight"]
    return -(weights * functional.logsigmoid(positive) + weights * negative).sum() / weights.sum() / 2


def of_model(name: str) -> Callable[[dict[str, Any], nn.Module], Any]:
    return lambda page, model: page[name](model)


EXAMPLES = (
    Example(
        "Question answering",
        lambda: transformers.BertForQuestionAnswering(transformers.BertConfig(**BERT)),
        make_question,
        collate_questions,
        of_model("QuestionAnswering"),
        metric="squad",
    ),
    Example("Detection with DETR", make_detr, make_image, collate_images, of_model("Detection"), rate=0.01),
    Example(
        "Speech recognition with CTC",
        make_wav2vec,
        make_utterance,
        partial(collate_sounds, name="input_values"),
        of_model("SpeechToText"),
        metric="wer",
        rate=0.01,
    ),
    Example("Images and texts with CLIP", make_clip, make_pair, default_collate, of_model("ImagesAndTexts"), contrast),
    Example(
        "Reward modelling",
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**BERT, num_labels=1)),
        make_comparison,
        collate_comparisons,
        of_model("Reward"),
        reward,
    ),
    Example(
        "Direct preference optimization",
        make_gpt,
        make_comparison,
        collate_preferences,
        lambda page, model: page["Preferences"](model, make_reference()),
        prefer,
    ),
    Example(
        "Accumulation for autoregressive models",
        make_gpt,
        make_text,
        collate_texts,
        of_model("LanguageModel"),
        accumulation=2,
    ),
    Example(
        "Fine-tuning Whisper",
        make_whisper,
        make_speech,
        partial(collate_sounds, name="input_features"),
        of_model("Transcription"),
        metric="wer",
    ),
    Example(
        "Translation with label smoothing",
        make_marian,
        make_sentence,
        collate_sentences,
        of_model("Translation"),
        smooth,
        metric="bleu",
    ),
    Example(
        "Time series", make_forecaster, make_series, default_collate, of_model("Forecast"), metric="mase", rate=0.01
    ),
    Example(
        "Detection",
        make_detector,
        make_scene,
        collate_scenes,
        lambda page, model: page["Yolo"](model, sum_losses),
        detect,
        rate=0.01,
    ),
    Example(
        "Retrieval with two towers",
        Towers,
        make_visit,
        collate_visits,
        lambda page, model: page["TwoTowers"](model, LOG_Q),
        retrieve,
    ),
    Example("Knowledge graphs", RotatE, make_triple, default_collate, of_model("KnowledgeGraph"), embed_graph),
)


def main(result: str, folder: str) -> None:
    """Train each example and write its losses."""
    losses = {example.title: train(example, Path(folder)) for example in EXAMPLES}
    if is_main_process():
        Path(result).write_text(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
