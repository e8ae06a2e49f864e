"""Makes random numbers independent of how samples are divided, so that launches can be compared.

What a step draws depends on its micro-batch, and so on the number of processes and the accumulation. A correct program
is correct for any numbers that it draws. A proof therefore uses numbers that are the same for all samples of a step:
noise and masks stay in effect, and no launch differs because of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import TensorDataset

from accmt.data.seeding import derive_seed, seed_generators
from accmt.libraries.private_names import TorchDispatchMode, arguments_of

_SEED = 0
_FIRST_ROW = ("cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "poisson", "_standard_gamma")


def seed_step(purpose: str, step: int) -> None:
    """Seed the global generators for a step; all its micro-batches draw the same numbers, on all processes."""
    seed_generators(derive_seed(_SEED, purpose, step))


class SameForAllSamples(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives each row of a random tensor the same numbers, and dropout its mean.

    The first dimension is that of the samples (or of their tokens). A row is drawn entry by entry, so a longer row, as
    in a batch with more padding, begins like a shorter one. Dropout draws with a fixed probability, and in shapes that
    mix samples and lengths, as in attention: its mean is what it computes in evaluation mode.
    """

    def __init__(self, purpose: str, step: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place = (purpose, step)
        self._calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func is torch.ops.aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        arguments = arguments_of(func)
        if "dropout_p" in arguments:
            place = arguments.index("dropout_p")
            if place < len(args):
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs["dropout_p"] = 0.0
            return func(*args, **kwargs)
        if name == "dropout":  # in inference mode it is not decomposed
            return func(args[0], args[1], train=False)
        if name == "native_dropout":
            return func(args[0], 0.0, train=True)
        if name == "randperm":
            return func(*args, **kwargs).copy_(torch.arange(args[0]))
        return self._repeat_first_row(func, name, args, kwargs)

    def _repeat_first_row(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        made = func(*args, **kwargs)
        if not isinstance(made, torch.Tensor) or made.ndim == 0:
            return made
        generator = torch.Generator().manual_seed(derive_seed(_SEED, *self._place, self._calls))
        self._calls += 1
        row = torch.rand(math.prod(made.shape[1:]), generator=generator, dtype=torch.float64)
        row = row.reshape(made.shape[1:]).to(made.device).expand(made.shape)
        if name == "bernoulli" and isinstance(args[0], torch.Tensor):
            probability = args[1] if len(args) > 1 and isinstance(args[1], float) else args[0]
            return made.copy_(row < probability)
        if name.startswith(("randn", "normal")):
            normal = torch.special.ndtri(row.clamp(1e-9, 1 - 1e-9))
            mean: Any = 0.0
            deviation: Any = 1.0
            if name.startswith("normal"):
                drawn = args[1:] if name == "normal_" else args
                given: list[Any] = [one for one in drawn if isinstance(one, int | float | torch.Tensor)]
                mean = given[0] if given else mean
                deviation = given[1] if len(given) > 1 else deviation
            return made.copy_(normal * deviation + mean)
        if name.startswith("rand_") or name == "rand":
            return made.copy_(row)
        if name.startswith("randint"):
            numbers = [one for one in args if isinstance(one, int)]
            low, high = (numbers[0], numbers[1]) if len(numbers) > 1 else (0, numbers[0])
            return made.copy_((low + row * (high - low)).long().clamp(max=high - 1))
        if name == "uniform_":
            low, high = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])[:2]
            return made.copy_(low + row * (high - low))
        return made.copy_(made[:1].clone().expand(made.shape)) if name in _FIRST_ROW and len(made) else made


def first_samples(data: Any, count: int | None) -> Any:
    """Return the first samples of a dataset; what reading one draws depends on its index only.

    A dataset stays what it is, with all its attributes: it becomes an object of a derived class.
    """
    if isinstance(data, torch.utils.data.IterableDataset) or not hasattr(data, "__len__"):
        return data
    length = len(data) if count is None else min(count, len(data))
    if type(data) in (list, tuple):
        return data[:length]
    if type(data) is TensorDataset:
        return TensorDataset(*(tensor[:length] for tensor in data.tensors))
    if hasattr(data, "select") and type(data).__module__.partition(".")[0] == "datasets":
        data = data.select(range(length))
    kind: Any = type(data)

    def get_item(self: Any, index: Any) -> Any:
        if isinstance(index, int):
            seed_generators(derive_seed(_SEED, "sample", index))
        return kind.__getitem__(self, index)

    own = {"__getitem__": get_item, "__len__": lambda self: length}
    if hasattr(kind, "__getitems__"):
        own["__getitems__"] = lambda self, indices: [self[index] for index in indices]
    derived = type(kind.__name__, (kind,), {**own, "__module__": kind.__module__, "__qualname__": kind.__qualname__})
    try:
        data.__class__ = derived
    except TypeError:  # an object of an extension: its class cannot change
        return data
    return data
