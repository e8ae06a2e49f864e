"""A small quantized tensor and an optimizer that keeps its state in such, as low-bit optimizers do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Rounded(Tensor):
    """Values in 8 bits and a scale: a tensor that is made of two others.

    Attributes:
        codes: The values as whole numbers.
        scale: What they are multiplied by.
    """

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Rounded:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, values: Tensor) -> Rounded:
        scale = values.abs().max().clamp(min=1e-12) / 127
        return cls((values / scale).round().to(torch.int8), scale, values.dtype)

    def dequantize(self) -> Tensor:
        return self.codes.to(self.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Rounded:
        return cls(parts["codes"], parts["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            return cls(args[0].codes, args[0].scale, kwargs.get("dtype") or args[0].dtype)
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].codes), func(args[0].scale), args[0].dtype)
        plain = [arg.dequantize() if isinstance(arg, cls) else arg for arg in args]
        return func(*plain, **kwargs)


class RoundedMomentum(torch.optim.Optimizer):
    """SGD with a momentum that is kept in 8 bits."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                before = state["momentum"].dequantize() if state else torch.zeros_like(weight)
                state["momentum"] = Rounded.of(before * group["momentum"] + weight.grad)
                weight -= group["lr"] * state["momentum"].dequantize()


class TensorRates(torch.optim.SGD):
    """SGD that keeps its rates in tensors and takes no others, as optimizers do that compile their step."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).clone()

    def step(self, closure: Any = None) -> None:
        if not all(isinstance(group["lr"], Tensor) for group in self.param_groups):
            message = "a rate was changed to a number"
            raise RuntimeError(message)
        super().step(closure)
