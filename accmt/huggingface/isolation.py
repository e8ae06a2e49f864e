"""Whether a model keeps packed documents apart, found by a trial: two documents in one row, and one of them changed.

What is compared is not only what the model returns but also what each of its layers gets. A projection after attention
sees a mixture at full size, where random weights, or a head that begins at 0, would hide it in the results.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accmt.huggingface.model_kinds import is_transformers_model
from accmt.libraries.private_names import attention_of
from accmt.without_trace import device_of, without_trace

_LENGTHS = 11, 8  # together a prime number, so that no other dimension of a tensor is taken for that of the tokens
_TOLERANCE = 1e-4
_ROUNDINGS = 16
"""How many roundings of the coarsest kind of number in the model are no mixture."""

_DRAWS = 3
"""How many documents are tried with coarse numbers: their rounding alone may send a token to another expert."""

_Seen = dict[tuple[str, int], torch.Tensor]


@dataclass(frozen=True)
class Verdict:
    """What the trial of a model has shown.

    Attributes:
        difference: The largest relative difference that another document makes.
        tolerance: How large it may be.
        layer: The layer that it was found before; "" for what the model returns.
        failure: Why the model could not be tried; None if it could.
    """

    difference: float = 0.0
    tolerance: float = _TOLERANCE
    layer: str = ""
    failure: str | None = None

    @property
    def is_coarse(self) -> bool:
        """Whether the model computes with numbers so coarse that rounding alone may differ by more than usual."""
        return self.tolerance > _TOLERANCE

    @property
    def is_isolated(self) -> bool:
        """Whether documents are kept apart."""
        return self.failure is None and self.difference <= self.tolerance


class PackedCall:
    """Calls of a model with packed documents, in the form of one that a run makes.

    Args:
        model: The model that is called.
        arguments: The call's arguments by name.
        rows: Rows of packed documents; None takes those of the call. Flash attention looks for documents in one alone.
    """

    def __init__(self, model: nn.Module, arguments: Mapping[str, Any], rows: int | None = None) -> None:
        self._model = model
        self._name, self._tokens = _find_tokens(arguments)
        self._positions = arguments.get("position_ids")
        kernel = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
        self._others = tuple(name for name in kernel if arguments.get(name) is not None)
        self._has_positions = self._positions is not None or not self._others
        self.rows = rows or (1 if self._tokens is None or self._tokens.shape[0] == 1 else 2)
        self._random = torch.Generator().manual_seed(0)

    @property
    def key(self) -> tuple[Any, ...]:
        """What the result depends on, besides the weights."""
        return id(self._model), attention_of(self._model), self.rows, self._name, self._has_positions, self._others

    def draw(self, length: int) -> torch.Tensor:
        """Return a document of random tokens, the same on every process."""
        device = device_of(self._model)
        if self._tokens is not None and self._tokens.is_floating_point():  # embeddings
            drawn = torch.randn(self.rows, length, self._tokens.shape[-1], generator=self._random)
            return drawn.to(device, self._tokens.dtype)
        ids = self._usable_ids()
        if len(ids) < 2:
            raise ValueError("there are not two tokens to make documents of")
        return ids[torch.randint(len(ids), (self.rows, length), generator=self._random)].to(device)

    def _usable_ids(self) -> torch.Tensor:
        """Return the ids of the vocabulary that have no special meaning, such as that of an image."""
        if not is_transformers_model(self._model):
            return torch.arange(0 if self._tokens is None else int(self._tokens.max()) + 1)
        weight: Any = self._model.get_input_embeddings().weight
        names = (name for name in vars(self._model.config) if name.endswith(("_token_id", "_token_index")))
        special = {value for name in names if isinstance(value := getattr(self._model.config, name), int)}
        return torch.tensor([token for token in range(weight.shape[0]) if token not in special])

    def arguments(self, *documents: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of a call with documents end to end."""
        tokens, lengths = torch.cat(documents, dim=1), [document.shape[1] for document in documents]
        arguments: dict[str, Any] = {self._name: tokens}
        if self._has_positions:
            start = 0 if self._positions is None else int(self._positions.min())  # 2 in models of RoBERTa's kind
            row = torch.cat([torch.arange(start, start + length) for length in lengths])
            arguments["position_ids"] = row.expand(self.rows, -1).to(tokens.device)
        if len(documents) > 1:
            ends = torch.tensor([0, *lengths]).cumsum(0).to(tokens.device, torch.int32)
            numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
            known = {"cu": ends, "max": max(lengths), "seq": numbers.to(tokens.device, torch.int32)}
            arguments |= {name: known[name.partition("_")[0]] for name in self._others}
        if "use_cache" in inspect.signature(self._model.forward).parameters:
            arguments["use_cache"] = False
        return arguments


def _find_tokens(arguments: Mapping[str, Any]) -> tuple[str, torch.Tensor | None]:
    """Return the name of the argument that holds a row's tokens, and what it holds; a user's model has its own name."""
    for name in ("input_ids", "inputs_embeds"):
        if arguments.get(name) is not None:
            return name, arguments[name]
    shape = getattr(arguments.get("position_ids"), "shape", None)
    for name, value in arguments.items():
        is_known = name in ("position_ids", "labels")
        if not is_known and isinstance(value, torch.Tensor) and value.shape == shape and value.dtype == torch.long:
            return name, value
    return "input_ids", None


def try_packing(
    model: nn.Module, call: PackedCall, context: AbstractContextManager[Any] | None = None, *, draws: int = _DRAWS
) -> Verdict:
    """Return whether a model keeps packed documents apart, in the form in which it is called.

    Weights, modes, buffers and random generators are what they were before, bit for bit.

    Args:
        model: The model, without the wrapper of the launch. Where it is sharded, all processes try it together.
        call: The form of the call.
        context: The precision that the model works in; None is that of the caller.
        draws: How often other documents are tried before they count as mixed.
    """
    with _unnoticed(model), context or nullcontext(), _without_cached_casts():
        try:
            verdicts = [_compare(model, call)]
            while not verdicts[-1].is_isolated and verdicts[-1].is_coarse and len(verdicts) < draws:
                verdicts.append(_compare(model, call))
            return min(verdicts, key=lambda verdict: verdict.difference)
        except Exception as error:  # noqa: BLE001 - whatever the model makes of arguments that it did not expect
            return Verdict(failure=f"{type(error).__name__}: {error}")


def _compare(model: nn.Module, call: PackedCall) -> Verdict:
    first, second = map(call.draw, _LENGTHS)
    other_first, other_second = map(call.draw, _LENGTHS)
    both = _record(model, call, first, second)
    pairs = [
        _differences(both, _record(model, call, other_first, second), slice(len_first := first.shape[1], None)),
        _differences(both, _record(model, call, first, other_second), slice(0, len_first)),
        _differences(both, _record(model, call, second), slice(len_first, None), slice(0, None)),
    ]
    found = [(layer, difference) for pair in pairs for layer, difference in pair]
    if not found:
        return Verdict(failure="nothing that it computes has one value for each token")
    values = torch.stack([difference for _, difference in found]).tolist()
    worst = max(range(len(values)), key=lambda index: math.inf if math.isnan(values[index]) else values[index])
    dtypes = {tensor.dtype for tensor in both.values()}
    return Verdict(values[worst], _tolerance(dtypes, next(iter(both.values())).device), found[worst][0])


def _tolerance(dtypes: set[torch.dtype], device: torch.device) -> float:
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
    if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        coarsest = max(coarsest, 2.0**-10)  # TF32
    return max(_TOLERANCE, _ROUNDINGS * coarsest)


def _differences(
    ours: _Seen, theirs: _Seen, part: slice, part_of_theirs: slice | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield how much the same document differs in two calls, before each layer, relative to its size."""
    for key in (key for key in ours if key in theirs):
        one, other = ours[key][:, part].float(), theirs[key][:, part_of_theirs or part].float()
        if one.shape == other.shape:
            size = torch.linalg.vector_norm(other)
            yield key[0], torch.linalg.vector_norm(one - other) / size.clamp(min=torch.finfo(torch.float32).tiny)


def _record(model: nn.Module, call: PackedCall, *documents: torch.Tensor) -> _Seen:
    """Call a model, and return what each of its layers gets, and the model itself returns, for each token."""
    seen: _Seen = {}
    calls: Counter[str] = Counter()
    length = sum(document.shape[1] for document in documents)

    def note(name: str, values: Any) -> None:
        for value in values:
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            if is_float and value.shape[:2] == (call.rows, length):
                seen[name, calls[name]] = value.detach().clone()  # some layers write into what they get
                calls[name] += 1

    with ExitStack() as stack:
        for name, layer in model.named_modules():
            if next(layer.children(), None) is None:
                hook = layer.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: note(name, [*args, *kwargs.values()]), with_kwargs=True
                )
                stack.callback(hook.remove)
        outputs = model.forward(**call.arguments(*documents))
    note("", outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple) else [outputs])
    return seen


@contextmanager
def _unnoticed(model: nn.Module) -> Iterator[None]:
    """Let a model compute in evaluation mode, without gradients, and give its state back afterwards."""
    # With inference mode, what the model caches now would be an error in training.
    with without_trace(model), torch.inference_mode(mode=False), torch.no_grad():
        model.eval()
        yield


@contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Let autocast keep no weight that it casts here: without gradients, and the step after this would take it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # noqa: FBT003 - torch's signature
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
