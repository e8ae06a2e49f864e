"""Whether a step calls the model itself: only its call averages gradients and gathers shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from accmt.errors import ModuleContractError, fail, file_of


@contextmanager
def noting_calls(model: nn.Module) -> Iterator[list[Any]]:
    """Yield a list that gets the outputs of each call of the model; None if the call did not return."""
    calls: list[Any] = []

    def finish(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        calls[-1] = outputs

    # Before other hooks: one that gathers shards may fail because another process has failed.
    begins = model.register_forward_pre_hook(lambda _module, _inputs: calls.append(None), prepend=True)
    ends = model.register_forward_hook(finish)
    try:
        yield calls
    finally:
        begins.remove()
        ends.remove()


def require_call(calls: list[Any]) -> None:
    """Reject a step that bypasses the model's wrapper: each process would train alone.

    Raises:
        ModuleContractError: There was no call.
    """
    # Each process would train its own model, and the comparison of replicas would find it only steps later.
    if not calls:
        got = "self.model was not called, so the gradients of the processes would not be averaged"
        expected = "the loss computed through self.model(...), or a self.model without a forward"
        do = "call self.model(...), not a submodule or method of it; or make self.model an nn.ModuleDict of its parts"
        raise fail(ModuleContractError, "training_step", got=got, expected=expected, do=do)


@contextmanager
def explaining_parts(model: nn.Module) -> Iterator[list[Any]]:
    """Explain the error of calling a submodule of a sharded model directly: only the model's call gathers its shards.

    Yields the list of `noting_calls`.
    """
    with noting_calls(model) as calls:
        try:
            yield calls
        except RuntimeError as error:
            # FSDP2 checks dtypes in its first forward, long after the hook that changed them.
            if calls and "to have dtype" in str(error):
                got = f"another dtype than the model was sharded with, for example from model.to() in a hook: {error}"
                expected, do = "the dtype from the start of the run", 'for example Trainer(mixed_precision="bf16")'
                raise fail(ModuleContractError, "self.model", got=got, expected=expected, do=do) from error
            if calls or "torch/" not in file_of(error):  # raised by the user's own code
                raise
            got = f"a submodule of self.model, which is sharded, was called instead of self.model itself: {error}"
            expected = "self.model(...), whose call gathers the shards"
            do = "call self.model(...), or train without FSDP2"
            raise fail(ModuleContractError, "a step of the module", got=got, expected=expected, do=do) from error
