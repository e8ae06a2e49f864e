"""Measures the memory of each process while a Llama is built, trained and saved: DDP beside FSDP2, on CPU processes.

    python tests/benchmarks/bench_sharded_memory.py

Peaks are of memory that is the process's own (anonymous, of which a thread takes samples), above what it had before
the model, in shares of the model's size. Training adds gradients and AdamW's two moments: 4 times the model on each
process under DDP, and 4 times a shard under FSDP2, beside what is whole for a moment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
LLAMA, TIED, HEAD = "Llama", "Llama, tied weights", "Llama, tied weights, new head"
KINDS = {LLAMA: "AutoModelForCausalLM", TIED: "AutoModelForCausalLM", HEAD: "AutoModelForSequenceClassification"}
WAYS = (("DDP", "ddp", LLAMA), ("FSDP2", "fsdp2", LLAMA), ("FSDP2", "fsdp2", TIED), ("FSDP2", "fsdp2", HEAD))
PROCESSES = (2, 4)
PHASES = ("built", "trained", "saved")


def own_memory() -> int:
    """Return the bytes that belong to this process alone."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Anonymous:"))


@contextmanager
def watching() -> Iterator[list[int]]:
    """Give a list whose only entry is the peak so far."""
    peak, stopped = [own_memory()], threading.Event()

    def look() -> None:
        while not stopped.wait(0.01):
            peak[0] = max(peak[0], own_memory())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stopped.set()
        thread.join()


def run(base: str, kind: str, result: str) -> None:
    """Build, train and save on this process, and write the peaks of all."""
    import torch
    from torch.utils.data import Dataset

    from accmt import AcceleratorModule, Callback, Trainer
    from accmt.processes import gather_objects, is_main_process
    from accmt.run.model_saver import save_model

    class Rows(Dataset[Any]):
        def __getitem__(self, index: int) -> dict[str, Any]:
            tokens = torch.arange(8) + index
            return {"input_ids": tokens, "labels": tokens if kind == KINDS[LLAMA] else torch.tensor(0)}

        def __len__(self) -> int:
            return 16

    class Phases(Callback):
        def on_fit_start(self) -> None:
            peaks["built"], peak[0] = peak[0], own_memory()

    peaks: dict[str, int] = {}
    hps = {"max_steps": 2, "batch_size": 1, "optim": {"type": "AdamW", "lr": 1e-4}}
    settings: dict[str, Any] = {"model_saving": None, "checkpoint_every": None, "verbose": False}
    settings["failures"] = {"preflight": False}  # which holds two more copies for a moment, of the shard
    folder = Path(result).parent
    torch.randn(8, 8, requires_grad=True).sum().backward()
    import transformers.models.llama.modeling_llama  # noqa: F401

    before = own_memory()
    with watching() as peak:
        trainer = Trainer(hps, folder / "model", logging_dir=folder / "logs", callbacks=Phases(), **settings)
        trainer.fit(AcceleratorModule.from_hf(base, kind, in_fit=True, pad_token_id=0), Rows())
        peaks["trained"] = peak[0]
    start = own_memory()
    with watching() as peak:
        save_model(trainer.run, folder / "saved")
        peaks["saved"] = peak[0] - start + before
    every = gather_objects({phase: peaks[phase] - before for phase in PHASES})
    if is_main_process():
        Path(result).write_text(json.dumps(every))


def main() -> None:
    """Measure every way, and print a table."""
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = {label: save_base(folder / label, is_tied=label != LLAMA) for label in KINDS}
        print(f"torch {torch.__version__}, a Llama of {sizes[LLAMA] / 1e6:.0f} MB ({sizes[TIED] / 1e6:.0f} MB tied)")
        print("peaks of each process in shares of the model")
        print("| | model | processes | built | trained | saved, main process | saved, others |\n" + "|---" * 7 + "|")
        for label, way, model in WAYS:
            for processes in PROCESSES:
                peaks = measure(folder, way, model, processes)
                print(f"| {label} | {model} | {processes} |" + row(peaks, sizes[model]), flush=True)
                time.sleep(1)


def save_base(folder: Path, *, is_tied: bool) -> int:
    """Save a model to begin from, and return its size in bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8000, tie_word_embeddings=is_tied, **sizes))
    model.save_pretrained(folder, max_shard_size="100MB")
    return sum(parameter.nbytes for parameter in model.parameters())


def measure(folder: Path, way: str, model: str, processes: int) -> list[dict[str, int]]:
    """Run one way in fresh processes."""
    result = folder / f"{model}-{way}-{processes}" / "result.json"
    result.parent.mkdir()
    program = "import sys; from accmt.cli.main import main; sys.exit(main())"
    launch = [sys.executable, "-c", program, "launch", "--cpu", "-N", str(processes), "--strat", way]
    # Else the C library keeps what was freed.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    script = [__file__, str(folder / model), KINDS[model], str(result)]
    ended = subprocess.run([*launch, *script], env=environment, check=False, capture_output=True, text=True)
    if not result.exists():  # gloo sometimes aborts when all is done
        sys.exit(f"{way} on {processes} processes ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    peaks: list[dict[str, int]] = json.loads(result.read_text())
    return peaks


def row(peaks: list[dict[str, int]], size: int) -> str:
    """Return what was measured, as the end of a line of the table."""
    most = [max(peak[phase] for peak in peaks) / size for phase in ("built", "trained")]
    saved = [peaks[0]["saved"] / size, max(peak["saved"] for peak in peaks[1:]) / size]
    return " " + " | ".join(f"{share:.2f}" for share in (*most, *saved)) + " |"


if __name__ == "__main__":
    run(*sys.argv[1:]) if len(sys.argv) > 1 else main()
