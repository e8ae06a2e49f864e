"""Whether a step calls the model itself: only its call averages gradients, and gathers shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from accmt.errors import ModuleContractError, explain, place_of


@contextmanager
def counting_calls(wrapper: nn.Module) -> Iterator[list[None]]:
    """Give a list that gets an entry with each call of the wrapper."""
    calls: list[None] = []
    # First of all: a hook that gathers shards may fail, because another process has.
    handle = wrapper.register_forward_pre_hook(lambda _module, _inputs: calls.append(None), prepend=True)
    try:
        yield calls
    finally:
        handle.remove()


def require_call(calls: list[None]) -> None:
    """Reject a step that uses another way to the model than its wrapper: each process would train alone.

    Raises:
        ModuleContractError: There was no call.
    """
    if not calls:
        got = "self.model was not called, so the gradients of the processes would not be averaged"
        expected = "the loss computed through self.model(...), or a self.model without a forward of its own"
        do = "call self.model(...), not a part or method of it; or let self.model be an nn.ModuleDict of its parts"
        raise ModuleContractError(explain("training_step", got, expected, do))


@contextmanager
def explaining_parts(model: nn.Module) -> Iterator[list[None]]:
    """Explain what a part of a sharded model says when it is called by itself: only the whole makes it whole.

    It gives a list that gets an entry with each call of the whole.
    """
    with counting_calls(model) as calls:
        try:
            yield calls
        except RuntimeError as error:
            if calls and "to have dtype" in str(error):
                got = f"another type of numbers than the model was sharded with, as model.to() in a hook makes: {error}"
                expected, do = "the type that it had when the run began", 'Trainer(mixed_precision="bf16"), say'
                raise ModuleContractError(explain("self.model", got, expected, do)) from error
            file, is_raised = place_of(error)
            if calls or (is_raised and "torch/" not in file):  # which the user's own code raises
                raise
            got = f"a part of self.model was called, which is sharded, and not self.model itself: {error}"
            expected, do = (
                "self.model(...), whose call gathers the shards",
                "call self.model(...), or train without FSDP2",
            )
            raise ModuleContractError(explain("a step of the module", got, expected, do)) from error
