"""A copy of tensors in host memory, so that a thread can write them during training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor

import torch
from torch import Tensor

from accmt.messages import warn_once


class HostSnapshot:
    """Host buffers that are reused from one copy to the next.

    Fresh memory costs several times the copy itself (the system hands it out page by page), so the buffers stay. Those
    for tensors of a CUDA device are pinned, which lets the device write into them directly; a machine that gives no
    more pinned memory still gets its checkpoint.

    Who reads a copy must be done with it before the next `take`.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor], helper: Executor | None = None) -> dict[str, Tensor]:
        """Copy tensors as they are now; when this returns, the sources may change. The copies live until the next one.

        Where torch computes with one thread, as a launcher sets it, `helper` copies half of those on the CPU: one core
        alone does not use the memory's speed.
        """
        self._fit(tensors)
        pairs = [(self._buffers[name], tensor.detach()) for name, tensor in tensors.items()]
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
        if helper is None or devices or torch.get_num_threads() > 1:
            _copy(pairs)
        else:
            by_size = sorted(pairs, key=lambda pair: pair[0].nbytes)
            other_half = helper.submit(_copy, by_size[::2])
            _copy(by_size[1::2])
            other_half.result()
        for device in devices:
            torch.accelerator.synchronize(device)
        return dict(self._buffers)

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Get the memory for a copy of such tensors, so that the first `take` takes no longer than the others."""
        self._fit(tensors)
        for buffer in self._buffers.values():
            buffer.zero_()

    def _fit(self, tensors: Mapping[str, Tensor]) -> None:
        self._buffers = {name: self._buffer_for(name, tensor) for name, tensor in tensors.items()}

    def _buffer_for(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
            return buffer
        if tensor.device.type == "cuda":
            try:
                return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            except RuntimeError as error:
                what = f"checkpoints are copied through ordinary memory, which takes longer: {error}"
                warn_once(what, about="pinned memory")
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for buffer, tensor in pairs:
        buffer.copy_(tensor, non_blocking=True)
