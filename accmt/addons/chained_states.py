"""Lets each of several chained optimizers save and load its own state, although they share one."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from torch.optim import Optimizer

if TYPE_CHECKING:
    from accmt import ChainedOptimizer


def separate_states(chained: ChainedOptimizer) -> None:
    """Make `state_dict` and `load_state_dict` of each chained optimizer those of its own parameters.

    Torch's `state_dict` rejects state of other parameters, and its `load_state_dict` replaces the state and the groups,
    which the next step of the chained optimizer would replace with the old ones.
    """

    def leave_own(one: Optimizer) -> None:
        own = (weight for group in one.param_groups for weight in group["params"])
        one.state = defaultdict(dict, {weight: chained.state[weight] for weight in own if weight in chained.state})

    def share(one: Optimizer, _: object = None) -> None:
        one.state = chained.state

    def take_over(one: Optimizer) -> None:
        group_of = {parameter: group for group in chained.param_groups for parameter in group["params"]}
        for number, loaded in enumerate(one.param_groups):
            for parameter in loaded["params"]:
                chained.state.pop(parameter, None)
                one.param_groups[number] = group_of[parameter]
            one.param_groups[number].update(loaded)
        chained.state.update(one.state)
        share(one)

    for one in chained.optimizers:
        one.register_state_dict_pre_hook(leave_own)
        one.register_state_dict_post_hook(share)
        one.register_load_state_dict_post_hook(take_over)
