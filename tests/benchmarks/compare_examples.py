"""Runs the examples of two checkouts, and compares the weights and the logged losses bit for bit.

    python tests/benchmarks/compare_examples.py OLD_CHECKOUT NEW_CHECKOUT FOLDER

What has been run in FOLDER already is not run again. The language model keeps the tokenizer that it starts from: the
vocabulary that `tokenizers` learns is another one in each process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file

LIMIT = ("--limit", "60")
EXAMPLES = {
    "digits": (),
    "language_model": LIMIT,
    "several_validation_sets": LIMIT,
    "distill_text_encoder": LIMIT,
    "finetune_text_classifier": LIMIT,
    "finetune_with_lora": LIMIT,
}
START = """
import runpy, sys
from transformers import PreTrainedTokenizerFast
PreTrainedTokenizerFast.train_new_from_iterator = lambda self, *_, **__: self
sys.path.insert(0, {examples!r})
runpy.run_path({script!r}, run_name="__main__")
"""
PROCESSES = {"digits": (1, 2), "language_model": (1, 2)}


def run(checkout: Path, name: str, processes: int, folder: Path) -> None:
    """Run an example of a checkout in a folder of its own, on one thread a process."""
    folder.mkdir(parents=True)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    examples, script = checkout / "examples", folder / "start.py"
    script.write_text(START.format(examples=str(examples), script=str(examples / f"{name}.py")))
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launch, str(script), "--output", str(folder / "model"), *EXAMPLES[name]]
    with (folder / "printed.txt").open("w") as printed:
        subprocess.run(command, cwd=folder, env=environment, stdout=printed, stderr=printed, check=True)


def losses(folder: Path) -> Iterator[tuple[str, float]]:
    """Yield the logged losses of a run, by name."""
    for history in sorted(folder.rglob("history.jsonl")):
        for line in history.read_text().splitlines():
            values = json.loads(line).get("values") or {}
            yield from ((name, value) for name, value in values.items() if "loss" in name)


def compare(old: Path, new: Path) -> str:
    """Return how many weights and losses two runs have in common, or the first that differ."""
    files = [sorted(file.relative_to(folder) for file in folder.rglob("*.safetensors")) for folder in (old, new)]
    models = [file for file in files[0] if "checkpoint" not in str(file)]
    number = 0
    for file in models:
        weights, others = load_file(old / file), load_file(new / file)
        different = [name for name in weights if not weights[name].equal(others[name])]
        if weights.keys() != others.keys() or different:
            return f"DIFFERENT: {file}, {different[:3]}"
        number += len(weights)
    logged, other = list(losses(old)), list(losses(new))
    if logged != other or not logged or not number:
        return f"DIFFERENT: {len(logged)} and {len(other)} losses, {number} tensors"
    return f"equal: {number} tensors of {len(models)} file(s), {len(logged)} losses"


def main() -> None:
    """Run and compare."""
    checkouts, folder = [Path(argument).absolute() for argument in sys.argv[1:3]], Path(sys.argv[3]).absolute()
    for name in EXAMPLES:
        for processes in PROCESSES.get(name, (1,)):
            places = [folder / side / f"{name}-{processes}" for side in ("old", "new")]
            for checkout, place in zip(checkouts, places, strict=True):
                if not place.exists():
                    run(checkout, name, processes, place)
            print(f"{name}, {processes} process(es): {compare(*places)}", flush=True)


if __name__ == "__main__":
    main()
