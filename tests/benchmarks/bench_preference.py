"""DPO here and in TRL on the CPU: tokens per second, and the losses of 50 steps side by side.

    .venv-chat-templates/bin/python tests/benchmarks/bench_preference.py

Both train the same model on the same pairs in the same order, with the log-probabilities of the reference computed
before: TRL's DPOTrainer in whole batches of 16 pairs and in micro-batches of 4, and the YAML that docs/coming-from.md
makes of it, with a token budget of 2,048. Runs take turns; the first step is not timed. Tokens are those of prompts and
answers, without padding. `make chat-templates` makes the environment.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accmt import Callback, PreferenceModule, Trainer
from accmt.tracking import read_history
from tests import conversations
from tests.conversations import make_tokenizer

STEP, MAX_LENGTH = 16, 512
WORDS = ["the", "rain", "window", "price", "don't", "e.g.", "3.14", "yes", "no", "why"]
HPS = f"""
hps:
  epochs: 1
  batch_size: {STEP}
  max_tokens: 2048
  optim: {{type: AdamW, lr: 1e-4, weight_decay: 0}}
  scheduler: {{type: LinearWithWarmup, warmup_ratio: 0}}
  model: {{path: base, type: AutoModelForCausalLM}}
  prefer: {{data: pairs.jsonl, loss: dpo, beta: 0.1, max_length: {MAX_LENGTH}, reference_folder: reference}}
"""


class Result(NamedTuple):
    """What a run measured: seconds from the end of the first step, and the loss of each step."""

    seconds: float
    losses: list[float]


def make_pairs(steps: int) -> list[dict[str, str]]:
    """Return pairs whose lengths vary as those of chats do: most are short, and a few are long."""
    draw = random.Random(0)

    def text(median: float) -> str:
        number = min(200, max(1, round(median * draw.lognormvariate(0, 0.8))))
        return "".join(f" {draw.choice(WORDS)}" for _ in range(number))

    return [{"prompt": text(15), "chosen": text(30), "rejected": text(30)} for _ in range(steps * STEP)]


def make_model(folder: Path, width: int, vocabulary: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tokenizer(conversations.CHATML).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes)).save_pretrained(folder)


class Clock(Callback):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_update_end(self) -> None:
        self.times.append(time.perf_counter())


def train_here(folder: Path, pairs: list[dict[str, str]]) -> Result:
    clock = Clock()
    own: dict[str, Any] = {"shuffle_train": False, "verbose": False, "dataloader_num_workers": 0, "clip_grad": 1.0}
    trainer = Trainer("hps.yaml", folder, callbacks=clock, log_every=1, model_saving=None, **own)
    trainer.fit(PreferenceModule.from_hps(trainer.hps), pairs)
    rows = [row["values"] for row in read_history(trainer.run.tracking.run_folder) if "values" in row]
    losses = [row["train_loss"] for row in rows if "train_loss" in row]
    return Result(clock.times[-1] - clock.times[0], losses)


def train_in_trl(folder: Path, pairs: list[dict[str, str]], micro: int) -> Result:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    times: list[float] = []

    class TheirClock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    config = DPOConfig(
        str(folder),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=STEP // micro,
        num_train_epochs=1,
        learning_rate=1e-4,
        beta=0.1,
        max_length=MAX_LENGTH,
        precompute_ref_log_probs=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        train_sampling_strategy="sequential",
    )
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained("base"),
        args=config,
        train_dataset=Dataset.from_list(pairs),
        processing_class=AutoTokenizer.from_pretrained("base"),
        callbacks=[TheirClock()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return Result(times[-1] - times[0], losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in {"threads": 1, "rounds": 3, "steps": 50, "width": 64, "vocabulary": 1024}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    pairs = make_pairs(options.steps)
    ways: dict[str, Callable[[Path, Any], Result]] = {"accmt": train_here}
    ways |= {f"TRL, {micro} pairs": partial(train_in_trl, micro=micro) for micro in (4, STEP)}
    results: dict[str, list[Result]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_model(Path("base"), options.width, options.vocabulary)
        Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        Path("hps.yaml").write_text(HPS)
        samples = PreferenceModule.from_hps("hps.yaml").make_samples(pairs)
        tokens = sum(len(ids) for index in range(STEP, len(pairs)) for ids in samples[index]["input_ids"])
        for number in range(options.rounds):
            for name, train in ways.items():
                results[name].append(train(Path(f"{name}-{number}"), pairs))
                print(f"{name}: {tokens / results[name][-1].seconds:,.0f} tokens/s", flush=True)
        os.chdir("/")
    speeds = {name: statistics.median(tokens / one.seconds for one in of) for name, of in results.items()}
    print(f"{options.steps} steps of {STEP} pairs; median of {options.rounds} runs in turn, {options.threads} threads:")
    for name, speed in speeds.items():
        print(f"{name}: {speed:,.0f} tokens/s; accmt is {speeds['accmt'] / speed:.2f} times as fast")
    own, *others = (results[name][0].losses for name in ways)
    print("| step | accmt | TRL |\n|---|---|---|")
    for step in range(0, options.steps, 7):
        print(f"| {step + 1} | {own[step]:.6f} | {others[0][step]:.6f} |")
    difference = max(abs(a - b) for of in others for a, b in zip(own, of, strict=True))
    print(f"largest difference of {len(own)} losses: {difference:.1e}")


if __name__ == "__main__":
    main()
