"""Low-bit optimizers beside others, of other kinds, and where their states cannot be kept.

`make quantized` runs it, with bitsandbytes and torchao.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accmt import ChainedOptimizer
from accmt.engine.sharded import reject_low_bit_states
from accmt.errors import ModuleContractError
from tests.quantized import test_matrix as matrix
from tests.quantized.test_matrix import NEEDS_COMPILER, Model, fit, has_low_bit_state, trained_weights
from tests.resume.unbroken import InterruptAt

pytestmark = matrix.pytestmark
base = matrix.base

MUON = {"kind": "matrix", "type": "Muon", "lr": 0.01}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Lion": {"type": "bitsandbytes.optim.Lion8bit", "lr": 1e-4},
    "AdEMAMix": {"type": "bitsandbytes.optim.AdEMAMix8bit", "lr": 1e-3},
    "Muon + bitsandbytes": {"type": "bitsandbytes.optim.AdamW8bit", "lr": 1e-3, "groups": [MUON]},
    "two of bitsandbytes": {
        "type": "bitsandbytes.optim.AdamW8bit",
        "lr": 1e-3,
        "groups": [{"match": "mlp", "type": "bitsandbytes.optim.Lion8bit", "lr": 1e-4}],
    },
    "stochastic rounding": {"type": "torchao.optim.AdamW8bit", "lr": 1e-3, "bf16_stochastic_round": True},
}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[NEEDS_COMPILER] if "stochastic" in one else []) for one in OPTIMIZERS]
)
def test_it_resumes_with_equal_bits(base: Path, name: str) -> None:
    def make() -> Model:
        return Model(base, "bf16", "full")

    before, whole, resumed = trained_weights(make()), make(), make()
    fit("out/whole", whole, OPTIMIZERS[name])
    fit("out/parts", make(), OPTIMIZERS[name], InterruptAt(7))
    assert has_low_bit_state(fit("out/parts", resumed, OPTIMIZERS[name], resume=True))
    expected, found = trained_weights(whole), trained_weights(resumed)
    assert all(not torch.equal(weight, before[one]) for one, weight in expected.items() if "norm" not in one)
    assert all(torch.equal(weight, found[one]) for one, weight in expected.items())


def test_shards_are_left_to_optimizers_whose_states_of_them_can_be_kept() -> None:
    """FSDP2: those of bitsandbytes cannot step shards, and the states of torchao's cannot be stored."""
    from bitsandbytes.optim import AdamW8bit
    from torchao import optim

    def weights() -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(4))]

    chained = ChainedOptimizer([torch.optim.SGD(weights()), AdamW8bit(weights())])
    for refused in (AdamW8bit(weights()), chained, optim.AdamW4bit(weights())):
        with pytest.raises(ModuleContractError, match=r"AdamW\dbit of \w+, and a model with sharded weights"):
            reject_low_bit_states(refused)
    for taken in (torch.optim.AdamW(weights()), optim._AdamW(weights())):
        reject_low_bit_states(taken)
