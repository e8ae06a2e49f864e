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
WAYS = {"DDP": "ddp", "FSDP2": "fsdp2"}
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


def run(base: str, result: str) -> None:
    """Build, train and save on this process, and write the peaks of all."""
    import torch
    from torch.utils.data import Dataset

    from accmt import AcceleratorModule, Callback, Trainer
    from accmt.processes import gather_objects, is_main_process
    from accmt.recovery.model_saver import save_model

    class Rows(Dataset[Any]):
        def __getitem__(self, index: int) -> dict[str, Any]:
            tokens = torch.arange(8) + index
            return {"input_ids": tokens, "labels": tokens}

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
        trainer.fit(AcceleratorModule.from_hf(base, "AutoModelForCausalLM", in_fit=True), Rows())
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
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8000, **sizes))
        model.save_pretrained(base, max_shard_size="100MB")
        size = sum(parameter.nbytes for parameter in model.parameters())
        del model
        print(f"torch {torch.__version__}, a Llama of {size / 1e6:.0f} MB; peaks of each process in shares of it")
        print("| | processes | built | trained | saved, main process | saved, others |\n|---|---|---|---|---|---|")
        for label, way in WAYS.items():
            for processes in PROCESSES:
                print(row(label, processes, measure(base, Path(name), way, processes), size), flush=True)
                time.sleep(1)


def measure(base: Path, folder: Path, way: str, processes: int) -> list[dict[str, int]]:
    """Run one way in fresh processes."""
    result = folder / f"{way}-{processes}" / "result.json"
    result.parent.mkdir()
    program = "import sys; from accmt.cli.main import main; sys.exit(main())"
    launch = [sys.executable, "-c", program, "launch", "--cpu", "-N", str(processes), "--strat", way]
    # Else the C library keeps what was freed.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    subprocess.run([*launch, __file__, str(base), str(result)], env=environment, check=True, capture_output=True)
    peaks: list[dict[str, int]] = json.loads(result.read_text())
    return peaks


def row(label: str, processes: int, peaks: list[dict[str, int]], size: int) -> str:
    """Return a line of the table."""
    most = [max(peak[phase] for peak in peaks) / size for phase in ("built", "trained")]
    saved = [peaks[0]["saved"] / size, max(peak["saved"] for peak in peaks[1:]) / size]
    return f"| {label} | {processes} | " + " | ".join(f"{share:.2f}" for share in (*most, *saved)) + " |"


if __name__ == "__main__":
    run(*sys.argv[1:]) if len(sys.argv) > 1 else main()
