"""TF32, the reduced precision of matrix products on NVIDIA GPUs; accmt leaves it as it is unless asked."""

from __future__ import annotations

import torch


def allow_tf32(flag: bool = True) -> None:  # noqa: FBT001, FBT002 - the documented signature
    """Let matrix products and convolutions on NVIDIA GPUs round their inputs to TF32.

    Args:
        flag: False takes it back.
    """
    torch.set_float32_matmul_precision("high" if flag else "highest")
    torch.backends.cudnn.allow_tf32 = flag
