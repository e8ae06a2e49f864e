"""A copy of tensors in host memory, so that training goes on while a thread writes them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class HostSnapshot:
    """Host buffers that are reused from one copy to the next.

    Fresh memory costs several times the copy itself (the system hands it out page by page), so the buffers stay. Where
    CUDA is there they are pinned, which lets the device write into them directly.

    Who reads a copy must be done with it before the next `take`.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors as they are now; when this returns, the sources may change.

        Args:
            tensors: Plain tensors on any device, by name.

        Returns:
            Contiguous host tensors with the same names, shapes, dtypes and bits. They live until the next `take`.
        """
        self._buffers = {name: self._buffer_for(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._buffers[name].copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        return dict(self._buffers)

    @property
    def size_bytes(self) -> int:
        """Host memory that the buffers hold."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _buffer_for(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
            return buffer
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
