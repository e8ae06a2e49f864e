"""Engines that compute each batch in units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accmt.addons.same_bits.sums import Gradients, TreeReduceScatter, UnitSum, add_up, all_reduce, total_norm
from accmt.addons.same_bits.units import ByUnits, Layout, unit_plan
from accmt.data import MicroBatch, SourceOptions
from accmt.data.windows import WindowMaker
from accmt.engine.base import Engine
from accmt.engine.reduction import buckets_of
from accmt.engine.sharded import Sharded
from accmt.errors import ArgumentError, fail
from accmt.options import Settings
from accmt.options.optimizer_and_scheduler_arguments import members_of, weights_of
from accmt.processes import num_processes
from accmt.sharded_tensors import is_dtensor

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accmt import AcceleratorModule

_ENTRY_BY_ENTRY = {
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD,
}  # fmt: skip
"""Optimizers that compute each entry of a weight by itself."""


def in_units(kind: type[Engine]) -> type[Engine]:
    """Return an engine that computes in units, and that otherwise works like `kind`."""
    return type(f"{kind.__name__}InUnits", (_InUnits, kind), {})


class _InUnits(Engine):
    """Adds up the gradients of units in a fixed order, whoever computes them.

    The gradients of a unit are taken from the parameters after its backward. They are added up in a tree over the units
    of a batch; the sums of several batches of a window, in their order.
    """

    total_norm = staticmethod(total_norm)

    def __init__(self, module: AcceleratorModule, accelerator: Accelerator, settings: Settings) -> None:
        super().__init__(module, accelerator)
        self.divisor = 1
        self._settings = settings
        self._units = UnitSum()
        self._batches: Gradients | None = None
        self._parameters: list[nn.Parameter] = []
        self._buffers: list[tuple[str, torch.Tensor, int]] = []
        self._is_sharded = isinstance(self, Sharded)
        self._layout = Layout(settings.optimization.same_bits or 1, is_interleaved=self._is_sharded)

    def arrange(self, options: SourceOptions) -> SourceOptions:
        layout = self._layout
        size = -(-options.batch_size // layout.num_units)
        if options.purpose != "train":  # results are in the order of the data
            layout = layout._replace(is_interleaved=True)
        return replace(options, batch_size=size, micro_batches_per_batch=layout.num_units, plan=unit_plan(layout))

    def group(self, maker: WindowMaker) -> WindowMaker:
        return ByUnits(self._layout, num_processes(), self._settings.optimization.accumulation_at)

    def require_optimizer(self, optimizer: Any) -> None:
        """Turn off fused kernels unless they were asked for: how they round depends on where a shard ends.

        Raises:
            ArgumentError: Weights are sharded, and the optimizer rounds by shards.
        """
        super().require_optimizer(optimizer)
        is_asked_for = bool(self._settings.hps.optim_kwargs.get("fused"))
        for member in members_of(optimizer):
            if self._is_sharded and (is_asked_for or type(member) not in _ENTRY_BY_ENTRY):
                got = f"{type(member).__name__}{'(fused=True)' * is_asked_for} of sharded weights"
                expected = "an optimizer whose steps do not depend on where a shard ends"
                do = "write `type: AdamW` in `optim`, and leave `fused` out; or train without sharding"
                raise fail(ArgumentError, self._settings.hps.where("optim"), got=got, expected=expected, do=do)
            if not is_asked_for:
                for group in member.param_groups:
                    if group.get("fused"):
                        group["fused"] = False
                vars(member).pop("_step_supports_amp_scaling", None)

    def wrap(self, optimizer: Any, *, set_to_none: bool, may_fail: bool = False) -> None:
        # `may_fail`: the wrapper of torch would add up gradients in an order of its own.
        super().wrap(optimizer, set_to_none=set_to_none, may_fail=True)
        reduce_scatter: Any = TreeReduceScatter()  # torch's protocol is private
        for part in self.unwrapped_model.modules():
            if isinstance(part, FSDPModule):
                _require_one_dimension(part)
                part.set_custom_reduce_scatter(reduce_scatter)
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        self._parameters = weights_of(optimizer)

    def begin_window(self) -> None:
        super().begin_window()
        self._units, self._batches = UnitSum(), None

    def end_micro_batch(self, micro_batch: MicroBatch) -> None:
        gradients: Gradients = []
        for parameter in self._parameters:
            gradients.append(parameter.grad)
            parameter.grad = None
        self._units.add(gradients)
        if not micro_batch.ends_batch:
            return
        total = self._units.take()
        if num_processes() > 1 and not self._is_sharded and total is not None:
            total = _reduce(self._parameters, total)
        self._batches = total if self._batches is None or total is None else add_up(self._batches, total)

    def reduce_gradients(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        for parameter, gradient in zip(self._parameters, self._batches or (), strict=False):
            # With 0 added, because x + 0 is not -0: a process without units has added zeros.
            parameter.grad = None if gradient is None else gradient.add_(0.0)
        self._units, self._batches = UnitSum(), None


def _require_one_dimension(part: nn.Module) -> None:
    """Reject shards with replicas: torch adds up the replicas in an order of its own."""
    for parameter in part.parameters():
        if is_dtensor(parameter) and parameter.device_mesh.ndim > 1:
            got, expected = "shards with replicas (`shard`, `replicate`)", "shards over all processes"
            do = 'parallelism={"fsdp": True}'
            raise fail(ArgumentError, "Trainer(same_bits=...)", got=got, expected=expected, do=do)


def _reduce(parameters: Sequence[nn.Parameter], gradients: Gradients) -> Gradients:
    """Return the sums of gradients over all processes; a parameter without one anywhere keeps None.

    Processes: collective.
    """
    has_gradient = torch.tensor([float(gradient is not None) for gradient in gradients], device=parameters[0].device)
    dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX)
    reduced: Gradients = list(gradients)
    for index, (parameter, is_anywhere) in enumerate(zip(parameters, has_gradient.tolist(), strict=True)):
        if is_anywhere and reduced[index] is None:
            reduced[index] = torch.zeros_like(parameter)
    present = [gradient for gradient in reduced if gradient is not None]
    for bucket in buckets_of(present):
        flat = all_reduce(torch.cat([gradient.reshape(-1) for gradient in bucket]))
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        for part, gradient in zip(parts, bucket, strict=True):
            gradient.copy_(part.view_as(gradient))
    return reduced
