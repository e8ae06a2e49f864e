"""A precision: matrix products in bfloat16, on whatever device."""

import torch


def coarse() -> torch.autocast:
    """Return the context in which steps run."""
    return torch.autocast("cuda" if torch.cuda.is_available() else "cpu", dtype=torch.bfloat16)
