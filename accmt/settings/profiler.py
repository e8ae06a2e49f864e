"""What `Trainer(profiler=...)` may be."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from accmt.settings.checks import raise_wrong_value

PROFILERS = ("simple", "advanced", "pytorch")


def require_profiler(value: Any) -> None:
    """Check what is to profile a run.

    Raises:
        ArgumentError: `value` is neither None, one of `PROFILERS`, an `accelerate.utils.ProfileKwargs` nor a
            `torch.profiler.profile`.
    """
    if value is None or (isinstance(value, str) and value in PROFILERS) or _is_instance(value):
        return
    nearest = get_close_matches(str(value), PROFILERS, n=1, cutoff=0.0)[0]
    names = ", ".join(f'"{name}"' for name in PROFILERS)
    expected = f"{names}, an accelerate.utils.ProfileKwargs or a torch.profiler.profile object, or None"
    raise_wrong_value("profiler", value, expected, f'profiler="{nearest}"?')


def _is_instance(value: Any) -> bool:
    if isinstance(value, str):
        return False
    from accelerate.utils import ProfileKwargs
    from torch.profiler import profile

    return isinstance(value, ProfileKwargs | profile)
