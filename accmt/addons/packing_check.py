"""Checks that the model does not mix packed documents in a row, which are separated by restarting positions."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from accmt.errors import DataError, fail
from accmt.huggingface.model_kinds import find_transformers_models, is_transformers_model, predicts_next_token
from accmt.libraries.private_names import attention_of, is_compiled
from accmt.messages import warn_once
from accmt.precisions import autocast
from accmt.run import EvaluationRun
from accmt.run.features import Feature
from accmt.without_trace import device_of, without_trace

# ---- Whether a model keeps packed documents apart, found by a trial: two documents in one row, and one of them
# changed.
#
# What is compared is not only what the model returns but also what each of its layers gets. A projection after
# attention sees a mixture at full size, where random weights, or a head that begins at 0, would hide it in the results.


_LENGTHS = 11, 8  # together a prime number, so that no other dimension of a tensor is taken for that of the tokens
_TOLERANCE = 1e-4
_ROUNDINGS = 16
"""How many roundings of the coarsest kind of number in the model are no mixture."""

_DRAWS = 3
"""How many documents are tried with coarse numbers: their rounding alone may send a token to another expert."""

_Seen = dict[tuple[str, int], torch.Tensor]


@dataclass(frozen=True)
class Verdict:
    """The result of a model's trial.

    Attributes:
        difference: The largest relative difference caused by another document.
        tolerance: The maximum accepted difference.
        layer: The layer whose inputs differ; "" for the model's output.
        failure: Why the trial failed; None if it did not.
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
        if is_transformers_model(self._model):  # without ids that have a special meaning, such as that of an image
            weight: Any = self._model.get_input_embeddings().weight
            names = (name for name in vars(self._model.config) if name.endswith(("_token_id", "_token_index")))
            special = {value for name in names if isinstance(value := getattr(self._model.config, name), int)}
            ids = torch.tensor([token for token in range(weight.shape[0]) if token not in special])
        else:
            ids = torch.arange(0 if self._tokens is None else int(self._tokens.max()) + 1)
        if len(ids) < 2:
            raise ValueError("there are not enough tokens to make two documents")
        return ids[torch.randint(len(ids), (self.rows, length), generator=self._random)].to(device)

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
    caches_casts = torch.is_autocast_cache_enabled()
    # With inference mode, what the model caches now would be an error in training.
    with without_trace(model), torch.inference_mode(mode=False), torch.no_grad(), context or nullcontext():
        model.eval()
        torch.set_autocast_cache_enabled(False)  # noqa: FBT003 - it would keep weights that were cast without gradients
        try:
            verdicts = [_compare(model, call)]
            while not verdicts[-1].is_isolated and verdicts[-1].is_coarse and len(verdicts) < draws:
                verdicts.append(_compare(model, call))
            return min(verdicts, key=lambda verdict: verdict.difference)
        except Exception as error:  # noqa: BLE001 - whatever the model makes of arguments that it did not expect
            return Verdict(failure=f"{type(error).__name__}: {error}")
        finally:
            torch.set_autocast_cache_enabled(caches_casts)


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
        return Verdict(failure="no tensor that it computes has one value per token")
    values = torch.stack([difference for _, difference in found]).tolist()
    worst = max(range(len(values)), key=lambda index: math.inf if math.isnan(values[index]) else values[index])
    coarsest = max(torch.finfo(tensor.dtype).eps for tensor in both.values())
    is_on_cuda = next(iter(both.values())).device.type == "cuda"
    if is_on_cuda and torch.get_float32_matmul_precision() != "highest":
        coarsest = max(coarsest, 2.0**-10)  # TF32
    return Verdict(values[worst], max(_TOLERANCE, _ROUNDINGS * coarsest), found[worst][0])


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


_IGNORED = -100
_EXPECTED = "documents that do not attend to each other"
_PAD = (
    "pad instead of packing: a collate function such as DataCollatorWithPadding, and max_tokens in the "
    "hyper-parameters, which leaves little padding"
)


class _Looked(NamedTuple):
    """What was seen of a batch, or of a call's arguments."""

    is_packed: bool
    has_crossing_labels: bool


class PackingCheck(Feature):
    """Rejects packed documents that the model would mix.

    It checks each call of the model, because the first packed batch may come at any step, and a step may pass other
    arguments than those in the batch. Each form of call is tried once.

    Args:
        model: The model, without the wrapper of the launch. Transformers models in it are watched, else itself.
        wrapped: The model as steps call it; None is itself.
        precision: Returns the context in which the steps of the run compute.
        needs_all: Whether each forward needs all processes. Packed rows may come to one process alone, so the trial is
            then made in the first call already, which all processes make together.
    """

    name = "packing_check"

    def __init__(
        self,
        model: nn.Module,
        *,
        wrapped: nn.Module | None = None,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
        needs_all: bool = False,
    ) -> None:
        self._model = model
        self._is_compiled = _is_compiled(model if wrapped is None else wrapped)
        watched = _find_watched(model, is_compiled=self._is_compiled)
        self._watched = {part: inspect.signature(part.forward).parameters for part in watched}
        self._precision = precision
        self._needs_all = needs_all
        self._verdicts: dict[tuple[Any, ...], Verdict] = {}
        self._caller: nn.Module | None = None
        self._is_in_root = False
        self._looked: _Looked | None = None
        self._was_passed = False

    @classmethod
    def for_run(cls, run: EvaluationRun) -> PackingCheck | None:
        is_watched = run.settings.hps.packing or _find_watched(run.unwrapped_model, is_compiled=_is_compiled(run.model))
        if run.state.fn == "predict" or not is_watched:
            return None
        precision = partial(autocast, run.accelerator)
        return cls(run.unwrapped_model, wrapped=run.model, precision=precision, needs_all=run.engine.needs_all)

    @contextmanager
    def during(self) -> Iterator[None]:
        """Look at each call, and let transformers models build no cache unless a call asks for one, as `generate` does.

        Nothing reads a cache in training, and transformers keeps packed documents apart only without one.

        Raises:
            DataError: In a call: documents are packed, and the model would mix them.

        Source: `_preprocess_mask_arguments` in transformers/masking_utils.py, and `_prepare_for_training` of its
            Trainer, which sets `config.use_cache`. The configuration is not changed here, because a model may be saved
            meanwhile.
        """
        with ExitStack() as stack:
            if self._needs_all:
                stack.callback(self._model.register_forward_pre_hook(self._note_root).remove)
                stack.callback(self._model.register_forward_hook(self._note_root, always_call=True).remove)
            for model, takes in self._watched.items():
                before = partial(self._before_forward, takes_cache="use_cache" in takes)
                stack.callback(model.register_forward_pre_hook(before, with_kwargs=True).remove)
                if not self._is_compiled:  # which would have to compile this, too
                    stack.callback(model.register_forward_hook(self._after_forward, always_call=True).remove)
            yield

    def before_forward(self, batch: Any) -> None:
        """Look at a batch of a training step before it is on the device, where looking would wait for all its work."""
        self._caller, self._looked, self._was_passed = None, None, False
        parts = (batch,) if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
        for held in parts:
            if isinstance(held, Mapping) and (_positions_in(held) is not None or _has_bounds(held)):
                break  # it says where documents begin
        else:
            return
        self._looked = _look_at(held)
        if self._looked.is_packed and self._is_compiled and len(self._watched) == 1:  # compiled calls are not looked at
            self._require_isolation(next(iter(self._watched)), held, self._looked)

    def after_forward(self, outputs: Any) -> None:
        """Check after a training step that it passed the positions of the documents to the model.

        Raises:
            DataError: The batch was packed, and no call of the model had its positions.
        """
        looked, self._looked = self._looked, None
        is_packed = looked is not None and looked.is_packed
        if is_packed and not self._watched:
            warn_once(
                f"packed documents: {type(self._model).__name__} has no argument position_ids, so it is unknown "
                "whether it separates documents",
                about="packed documents",
            )
        if not is_packed or self._was_passed or self._is_compiled or not any(map(is_transformers_model, self._watched)):
            return
        called = list(find_transformers_models(self._model))
        names = ", ".join(type(model).__name__ for model in called)
        got = f"a batch with position_ids that restart within a row, but {names} was called without them"
        takes = any("position_ids" in self._watched[model] for model in called)
        do = "pass them to the model, for example with self.model(**batch)" if takes else _PAD
        raise fail(DataError, "packed documents", got=got, expected=_EXPECTED, do=do)

    def _before_forward(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, takes_cache: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if takes_cache and kwargs.get("use_cache") is None and kwargs.get("past_key_values") is None:
            kwargs["use_cache"] = False
        if self._caller is None and not torch.compiler.is_compiling():
            self._caller = model  # what it calls in turn is its own affair
            self._look_at_call(model, {**dict(zip(self._watched[model], args, strict=False)), **kwargs})
        return args, kwargs

    def _note_root(self, *call: Any) -> None:
        self._is_in_root = len(call) == 2  # module and arguments; with what it returned it is over

    def _after_forward(self, model: nn.Module, _args: Any, _outputs: Any) -> None:
        if self._caller is model:
            self._caller = None

    def _look_at_call(self, model: Any, arguments: Mapping[str, Any]) -> None:
        if self._needs_all and self._is_in_root:  # a submodule called separately cannot compute
            self._try_together(model, arguments)
        mask = arguments.get("attention_mask")
        says_who_attends = mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2)
        positions = _positions_in(arguments)
        self._was_passed |= says_who_attends or positions is not None or _has_bounds(arguments)
        if says_who_attends or (positions is None and not _has_bounds(arguments)):
            return
        # Positions that a step makes on the device are the only ones that have to be waited for.
        is_waited_for = positions is None or positions.device.type != "cpu"
        looked = self._looked if is_waited_for and self._looked is not None else _look_at(arguments)
        if looked.is_packed:
            self._require_isolation(model, arguments, looked)

    def _require_isolation(self, model: Any, arguments: Mapping[str, Any], looked: _Looked) -> None:
        where = f"packed documents in {type(model).__name__}"
        is_causal = is_transformers_model(model) and predicts_next_token(model)
        if looked.has_crossing_labels and is_causal and arguments.get("labels") is not None:
            got = "labels across documents: the first token of one is the target of the last token of another"
            do = "labels[position_ids == 0] = -100, as DataCollatorWithFlattening does"
            raise fail(DataError, where, got=got, expected="a label of -100 for each document's first token", do=do)
        if arguments.get("attention_mask") is not None:
            got = "position_ids that restart within a row, with an attention_mask over the whole row"
            do = "remove attention_mask from the batch: packed rows have no padding"
            raise fail(DataError, where, got=got, expected=_EXPECTED, do=do)
        if arguments.get("use_cache") or arguments.get("past_key_values") is not None:
            got = "a call with use_cache=True or past_key_values: with a cache, transformers mixes the documents"
            raise fail(
                DataError, where, got=got, expected=_EXPECTED, do="remove them from the call: training needs no cache"
            )
        call = PackedCall(model, arguments)
        if self._needs_all:
            self._try_together(model, arguments)  # nothing, since the first call
            call = _plain_call(model, arguments, call.rows)
        elif call.key not in self._verdicts:
            self._verdicts[call.key] = try_packing(model, call, self._precision())
        verdict = self._verdicts[call.key]
        if not verdict.is_isolated:
            self._reject(model, where, verdict)

    def _try_together(self, model: nn.Module, arguments: Mapping[str, Any]) -> None:
        takes = self._watched[model]
        if "position_ids" not in takes and all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in takes.values()):
            return
        for rows in (1, 2):
            call = _plain_call(model, arguments, rows)
            if call.key not in self._verdicts:  # one draw, since all have to make the same number of calls
                self._verdicts[call.key] = try_packing(model, call, self._precision(), draws=1)

    def _reject(self, model: Any, where: str, verdict: Verdict) -> None:
        attention = attention_of(model)
        by = "" if attention is None else f" with attn_implementation={attention!r}"
        by += "" if "position_ids" in self._watched[model] else ", in a model without position_ids"
        if verdict.failure is None:
            place = f"before layer {verdict.layer}" if verdict.layer else "in the output"
            got = f"mixed documents{by}: {place}, one changes by {verdict.difference:.0%} if another is in its row"
            do = f"{_PAD}; or use a model or an attn_implementation that separates packed documents"
            raise fail(DataError, where, got=got, expected=_EXPECTED, do=do)
        got = f"the trial of two packed documents{by} failed: {verdict.failure}"
        if is_transformers_model(model):
            raise fail(DataError, where, got=got, expected=_EXPECTED, do=_PAD)
        warn_once(f"{where}: {got}; it is unknown whether they attend to each other", about="packed documents")


def _plain_call(model: nn.Module, arguments: Mapping[str, Any], rows: int) -> PackedCall:
    """Return the form of call that all processes of a sharded model try, whatever their batches hold."""
    name = "inputs_embeds" if arguments.get("input_ids") is None else "input_ids"
    attention = str(attention_of(model))
    return PackedCall(model, {name: arguments.get(name)}, rows if "flash" in attention else 1)


def _find_watched(model: nn.Module, *, is_compiled: bool) -> list[nn.Module]:
    """Return the models whose calls are looked at; none if no model says where documents begin."""
    watched: list[nn.Module] = list(find_transformers_models(model))
    if not is_compiled:  # those inside another one, too: a step may compute its loss in parts
        watched = list(filter(is_transformers_model, model.modules()))
    if not watched and "position_ids" in inspect.signature(model.forward).parameters:
        watched = [model]
    return watched


def _is_compiled(model: nn.Module) -> bool:
    """Return whether calls of the transformers models in a model are compiled, not only parts of these."""
    if is_compiled(model) or "_orig_mod" in dict(model.named_children()):  # torch.compile(model)
        return True
    return not is_transformers_model(model) and any(map(_is_compiled, model.children()))


def _positions_in(arguments: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the positions of a row's tokens; those of images, which have three dimensions, are no documents'."""
    positions = arguments.get("position_ids")
    return positions if isinstance(positions, torch.Tensor) and positions.ndim in (1, 2) else None


def _has_bounds(arguments: Mapping[str, Any]) -> bool:
    """Return whether the bounds of several documents are there, as varlen kernels take them."""
    bounds = arguments.get("cu_seq_lens_q")
    return isinstance(bounds, torch.Tensor) and bounds.numel() > 2


def _look_at(arguments: Mapping[str, Any]) -> _Looked:
    """Return whether positions stop rising somewhere within a row, padding aside, or bounds say so.

    And whether the token at which they start again has a label.
    """
    positions, mask = _positions_in(arguments), arguments.get("attention_mask")
    labels: Any = arguments.get("labels")
    if positions is None:
        return _Looked(_has_bounds(arguments), has_crossing_labels=False)
    falls = positions[..., 1:] <= positions[..., :-1]
    if isinstance(mask, torch.Tensor) and mask.shape == positions.shape:
        falls = falls & (mask[..., 1:] != 0) & (mask[..., :-1] != 0)
    if not falls.any():
        return _Looked(is_packed=False, has_crossing_labels=False)
    crossing = falls & (labels[..., 1:] != _IGNORED) if getattr(labels, "shape", None) == positions.shape else falls[:0]
    return _Looked(is_packed=True, has_crossing_labels=bool(crossing.any()))
