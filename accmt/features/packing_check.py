"""Checks that packed documents, several in one row, are not mixed: positions that start again separate them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from accmt.errors import DataError, explain
from accmt.features.hooks import Feature
from accmt.huggingface.isolation import PackedCall, Verdict, try_packing
from accmt.huggingface.model_kinds import find_transformers_models, is_transformers_model, predicts_next_token
from accmt.libraries.private_names import attention_of, children_of, is_compiled
from accmt.messages import warn_once
from accmt.precision import autocast
from accmt.run import EvaluationRun

_IGNORED = -100
_EXPECTED = "documents that do not attend to one another"
_PAD = (
    "pad instead of packing: a collate function such as DataCollatorWithPadding, and max_tokens in the "
    "hyper-parameters, which leaves little padding"
)


class _Looked(NamedTuple):
    """What was seen of a batch, or of a call's arguments."""

    is_packed: bool
    has_crossing_labels: bool


class PackingCheck(Feature):
    """Lets no run work on packed documents that its model would mix.

    It looks at each call of the model, because a batch may be the first packed one at any step, and a step may pass on
    other arguments than the batch holds. Whether the model keeps documents apart is tried once for each form of call.

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
        self._watched = _find_watched(model, is_compiled=self._is_compiled)  # with the arguments that each takes
        self._precision = precision
        self._needs_all = needs_all
        self._verdicts: dict[tuple[Any, ...], Verdict] = {}
        self._caller: nn.Module | None = None
        self._is_in_root = False
        self._looked: _Looked | None = None
        self._was_passed = False

    @classmethod
    def for_run(cls, run: EvaluationRun) -> PackingCheck | None:
        if run.state.fn == "predict":
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

    def after_forward(self) -> None:
        """Check after a training step that it told the model where the documents of its batch begin.

        Raises:
            DataError: The batch was packed, and no call of the model had its positions.
        """
        looked, self._looked = self._looked, None
        is_packed = looked is not None and looked.is_packed
        if is_packed and not self._watched:
            warn_once(
                f"packed documents: {type(self._model).__name__} takes no position_ids, so whether its steps keep "
                "documents apart is unknown",
                about="packed documents",
            )
        if not is_packed or self._was_passed or self._is_compiled or not any(map(is_transformers_model, self._watched)):
            return
        called = list(find_transformers_models(self._model))
        names = ", ".join(type(model).__name__ for model in called)
        got = f"a batch with position_ids that start again within a row, and {names} was called without them"
        takes = any("position_ids" in self._watched[model] for model in called)
        do = "pass them on, as self.model(**batch) does" if takes else _PAD
        raise DataError(explain("packed documents", got, _EXPECTED, do))

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
        if self._needs_all and self._is_in_root:  # a part that is called by itself cannot compute at all
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
            got = "labels that cross documents: the first token of one is the target of the last token of another"
            do = "labels[position_ids == 0] = -100, as DataCollatorWithFlattening does"
            raise DataError(explain(where, got, "-100 as the label of each document's first token", do))
        if arguments.get("attention_mask") is not None:
            got = "position_ids that start again within a row, beside an attention_mask, which covers the whole row"
            do = "leave attention_mask out of the batch: packed rows have no padding"
            raise DataError(explain(where, got, _EXPECTED, do))
        if arguments.get("use_cache") or arguments.get("past_key_values") is not None:
            got = "a call with use_cache=True or past_key_values: with a cache, transformers mixes the documents"
            raise DataError(explain(where, got, _EXPECTED, "leave them out of the call: training needs no cache"))
        verdict = self._find_verdict(model, arguments)
        if not verdict.is_isolated:
            self._reject(model, where, verdict)

    def _find_verdict(self, model: nn.Module, arguments: Mapping[str, Any]) -> Verdict:
        call = PackedCall(model, arguments)
        if self._needs_all:
            self._try_together(model, arguments)  # nothing, since the first call
            call = _plain_call(model, arguments, call.rows)
        elif call.key not in self._verdicts:
            self._verdicts[call.key] = try_packing(model, call, self._precision())
        return self._verdicts[call.key]

    def _try_together(self, model: nn.Module, arguments: Mapping[str, Any]) -> None:
        if not _takes_positions(self._watched[model]):
            return
        for rows in (1, 2):
            call = _plain_call(model, arguments, rows)
            if call.key not in self._verdicts:  # one draw, since all have to make the same number of calls
                self._verdicts[call.key] = try_packing(model, call, self._precision(), draws=1)

    def _reject(self, model: Any, where: str, verdict: Verdict) -> None:
        attention = attention_of(model)
        by = "" if attention is None else f" with attn_implementation={attention!r}"
        by += "" if "position_ids" in self._watched[model] else ", in a model that takes no position_ids"
        if verdict.failure is None:
            place = f"before its layer {verdict.layer}" if verdict.layer else "in what it returns"
            got = (
                f"documents that are mixed{by}: {place} one changes by {verdict.difference:.0%} with another beside it"
            )
            do = f"{_PAD}; or take a model or an attn_implementation that keeps packed documents apart"
            raise DataError(explain(where, got, _EXPECTED, do))
        got = f"the trial of two packed documents{by} failed: {verdict.failure}"
        if is_transformers_model(model):
            raise DataError(explain(where, got, _EXPECTED, _PAD))
        warn_once(f"{where}: {got}; whether they attend to one another is unknown", about="packed documents")


def _plain_call(model: nn.Module, arguments: Mapping[str, Any], rows: int) -> PackedCall:
    """Return the form of call that all processes of a sharded model try, whatever their batches hold."""
    name = "inputs_embeds" if arguments.get("input_ids") is None else "input_ids"
    attention = str(attention_of(model))
    return PackedCall(model, {name: arguments.get(name)}, rows if "flash" in attention else 1)


def _is_compiled(model: nn.Module) -> bool:
    """Return whether calls of the transformers models in a model are compiled, not only parts of these."""
    if is_compiled(model) or "_orig_mod" in children_of(model):  # torch.compile(model)
        return True
    return not is_transformers_model(model) and any(map(_is_compiled, model.children()))


def _find_watched(model: nn.Module, *, is_compiled: bool) -> dict[nn.Module, Mapping[str, inspect.Parameter]]:
    """Return the models whose calls are looked at, and the arguments that each takes.

    Those inside another one are called by it, and by a step that computes its loss in parts.
    """
    found: list[nn.Module] = list(find_transformers_models(model))
    if not is_compiled:
        found = list(filter(is_transformers_model, model.modules()))
    if not found and "position_ids" in inspect.signature(model.forward).parameters:
        found = [model]
    return {part: inspect.signature(part.forward).parameters for part in found}


def _takes_positions(takes: Mapping[str, inspect.Parameter]) -> bool:
    return "position_ids" in takes or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())


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
