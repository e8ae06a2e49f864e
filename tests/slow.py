"""A clock that stands still, and toys that move it: what they take is known to the second."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from tests.toys import Linear, make_points


class Ticks:
    """A clock that tests move; the fixture `clock` puts it in the place of the run's."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowLinear(Linear):
    """Takes 2 seconds to train a batch, and 3 to validate one."""

    def __init__(self, clock: Ticks) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Any) -> torch.Tensor:
        self.clock.now += 2
        return self.step(batch)

    def validation_step(self, batch: Any) -> Any:
        self.clock.now += 3
        return self.step(batch)


class SlowData(Dataset[tuple[torch.Tensor, ...]]):
    """Takes a quarter of a second to fetch a point."""

    def __init__(self, clock: Ticks, count: int) -> None:
        self.points, self.clock = make_points(count), clock

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        self.clock.now += 0.25
        return self.points[index]
