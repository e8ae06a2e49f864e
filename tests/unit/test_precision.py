"""TF32 is switched only where somebody asks for it."""

from __future__ import annotations

import pytest
import torch

from accmt import allow_tf32


@pytest.fixture(autouse=True)
def _restore():
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = cudnn


@pytest.mark.feature("D34")
@pytest.mark.parametrize(("arguments", "precision", "cudnn"), [((), "high", True), ((False,), "highest", False)])
def test_tf32_is_allowed_and_taken_back_for_products_and_convolutions(arguments, precision, cudnn):
    torch.set_float32_matmul_precision("medium")
    allow_tf32(*arguments)
    assert torch.get_float32_matmul_precision() == precision
    assert torch.backends.cudnn.allow_tf32 is cudnn
