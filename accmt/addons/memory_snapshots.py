"""Records which code allocates the memory of a GPU."""

from __future__ import annotations

import torch

from accmt.callbacks.callback import StatelessCallback
from accmt.errors import ArgumentError, fail
from accmt.libraries.private_names import _dump_snapshot, _record_memory_history
from accmt.messages import say, warn
from accmt.processes import process_index

_FOLDER = "memory"


class MemorySnapshots(StatelessCallback):
    """Records which code allocates the memory of a CUDA device: files for https://pytorch.org/memory_viz.

    Each process writes `memory/step-<step>-process-<rank>.pickle` into the run folder, every `every` optimizer steps
    and when memory runs out.

    Args:
        every: Optimizer steps between two files.
        max_entries: How many of the newest allocations are kept.

    Raises:
        ArgumentError: `every` is not a whole number from 1.

    Source:
        https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
    """

    def __init__(self, every: int = 100, *, max_entries: int = 100_000) -> None:
        if not isinstance(every, int) or every < 1:
            expected = "a number of optimizer steps from 1"
            raise fail(ArgumentError, "MemorySnapshots", got=f"every={every!r}", expected=expected, do="every=100")
        self.every = every
        self.max_entries = max_entries
        self._is_recording = False

    def on_fit_start(self) -> None:
        """Start recording."""
        device = torch.device(self.trainer.device)
        self._is_recording = device.type == "cuda"
        if self._is_recording:
            _record_memory_history(max_entries=self.max_entries)
        else:
            warn(f"MemorySnapshots records nothing: training is on {device.type}, and only CUDA devices are recorded")

    def on_update_end(self) -> None:
        """Write a file, if it is due."""
        if self.state.global_step % self.every == 0:
            self._write("")

    def on_cuda_out_of_memory(self) -> None:
        """Write a file that shows what filled the memory."""
        self._write("-out-of-memory")

    def on_fit_end(self) -> None:
        """Stop recording."""
        if self._is_recording:
            _record_memory_history(enabled=None)
            self._is_recording = False

    def _write(self, ending: str) -> None:
        if not self._is_recording:
            return
        folder = self.trainer.run.tracking.run_folder / _FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"step-{self.state.global_step:08}-process-{process_index()}{ending}.pickle"
        _dump_snapshot(str(file))  # type: ignore[no-untyped-call]
        say(f"allocations on the GPU: {file}, for https://pytorch.org/memory_viz")
