"""Engines that compute each batch in units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from accmt.addons.same_bits.sums import Gradients, TreeReduceScatter, UnitSum, add_up, all_reduce, total_norm
from accmt.addons.same_bits.units import ByUnits, Layout, unit_plan
from accmt.data import MicroBatch, SourceOptions
from accmt.data.windows import WindowMaker
from accmt.engine.base import Engine
from accmt.engine.reduction import reduce_together
from accmt.engine.sharded import Sharded
from accmt.engine.sync_batchnorm import is_batch_norm
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

_CASTING = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""The policy of a run in bf16, unless the user has chosen another one."""


def in_units(kind: type[Engine]) -> type[Engine]:
    """Return an engine that computes in units, and that otherwise works like `kind`."""
    return type(f"{kind.__name__}InUnits", (_InUnits, kind), {})


class _InUnits(Engine):
    """Adds up the gradients of units in a fixed order, whoever computes them.

    The gradients of a unit are taken from the parameters after its backward. They are added up in a tree over the units
    of a batch; the sums of several batches of a window, in their order.

    Running statistics of batch norm are the mean of those of the units, each of which begins with those before the
    window.
    """

    total_norm = staticmethod(total_norm)

    def __init__(self, module: AcceleratorModule, accelerator: Accelerator, settings: Settings) -> None:
        super().__init__(module, accelerator)
        self.divisor = 1
        self._settings = settings
        self._units = UnitSum()
        self._batches: Gradients | None = None
        self._parameters: list[nn.Parameter] = []
        self._statistics: list[torch.Tensor] = []
        self._statistics_before: list[torch.Tensor] = []
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
                    if "fused" in group:  # also None, which torch, or a checkpoint of it, may take otherwise
                        group["fused"] = False
                    if group.get("foreach", False) is None and self.accelerator.device.type == "cuda":
                        group["foreach"] = True  # torch's default there, but only where `fused` is None
                vars(member).pop("_step_supports_amp_scaling", None)

    def wrap(self, optimizer: Any, *, set_to_none: bool, may_fail: bool = False) -> None:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if self._is_sharded and plugin is not None and plugin.mixed_precision_policy == _CASTING:
            # FSDP2 would compute in bf16 what autocast leaves in float32, such as norms, and unsharded it does not.
            plugin.mixed_precision_policy = None
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
        self._statistics = statistics_of(self.unwrapped_model)
        self._statistics_before = [statistic.clone() for statistic in self._statistics]

    def end_micro_batch(self, micro_batch: MicroBatch) -> None:
        gradients: Gradients = []
        for parameter in self._parameters:
            gradients.append(parameter.grad)
            parameter.grad = None
        statistics = self._take_statistics(is_counted=micro_batch.batch is not None)
        has_others = num_processes() > 1
        if self._is_sharded and has_others:  # FSDP2 adds up gradients over the processes after each round
            reduce_together(statistics, all_reduce)
        self._units.add([*gradients, *statistics])
        if not micro_batch.ends_batch:
            return
        total = self._units.take() or []
        if has_others and not self._is_sharded:
            self._add_missing(total)
            reduce_together([addend for addend in total if addend is not None], all_reduce)
        self._batches = total if self._batches is None else add_up(self._batches, total)

    def reduce_gradients(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        sums = self._batches or []
        for parameter, gradient in zip(self._parameters, sums, strict=False):
            # With 0 added, because x + 0 is not -0: a process without units has added zeros.
            parameter.grad = None if gradient is None else gradient.add_(0.0)
        if self._statistics and sums and sums[-1]:  # the number of units: none if no sample could be read
            for statistic, total in zip(self._statistics, sums[len(self._parameters) :], strict=False):
                statistic.copy_(total / sums[-1])  # type: ignore[operator, arg-type]  # only gradients may be None
        self._units, self._batches = UnitSum(), None

    def _take_statistics(self, *, is_counted: bool) -> list[torch.Tensor]:
        """Return the statistics after a unit, and the number of units; and let the next unit begin as this one.

        Args:
            is_counted: Whether the unit is this process's, not borrowed: otherwise, all are 0.
        """
        if not self._statistics:
            return []
        taken = [statistic.double() for statistic in self._statistics]
        taken.append(torch.ones_like(taken[0].sum()))
        for statistic, before in zip(self._statistics, self._statistics_before, strict=True):
            statistic.copy_(before)
        return taken if is_counted else list(map(torch.zeros_like, taken))

    def _add_missing(self, sums: Gradients) -> None:
        """Set zeros for gradients that only other processes have; one that no process has stays None.

        Processes: collective.
        """
        device = self._parameters[0].device
        has_gradient = torch.tensor([float(addend is not None) for addend in sums], device=device)
        dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX)
        for index, parameter in enumerate(self._parameters):
            if sums[index] is None and has_gradient[index]:
                sums[index] = torch.zeros_like(parameter)


def _require_one_dimension(part: nn.Module) -> None:
    """Reject shards with replicas: torch adds up the replicas in an order of its own."""
    for parameter in part.parameters():
        if is_dtensor(parameter) and parameter.device_mesh.ndim > 1:
            got, expected = "shards with replicas (`shard`, `replicate`)", "shards over all processes"
            do = 'parallelism={"fsdp": True}'
            raise fail(ArgumentError, "Trainer(same_bits=...)", got=got, expected=expected, do=do)


def statistics_of(model: nn.Module) -> list[torch.Tensor]:
    """Return the running statistics of batch norm that training changes; whole numbers are counts of batches."""
    statistics: list[torch.Tensor] = []
    for part in model.modules():
        if is_batch_norm(part) and part.training and part.track_running_stats:
            statistics += part.buffers(recurse=False)
    return statistics
