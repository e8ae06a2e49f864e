"""Every use of another library's private names, each behind a function that explains its purpose.

Private names may disappear in any release. A test checks each of them separately, so that a new release fails there, by
name, and not somewhere in a run. Nothing here imports a library that is not in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.cuda.memory import _dump_snapshot as _dump_snapshot  # noqa: PLC0414 - exported
from torch.cuda.memory import _record_memory_history as _record_memory_history  # noqa: PLC0414
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: PLC0414 - exported
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass  # noqa: PLC0414
from torch.utils._pytree import tree_leaves as tree_leaves  # noqa: PLC0414 - exported
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory as pin_memory  # noqa: PLC0414

from accmt.sharded_tensors import class_of

if TYPE_CHECKING:
    import torchmetrics
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from transformers import PreTrainedModel

Around: TypeAlias = Callable[[nn.Module], AbstractContextManager[None]]
"""Creates a context for one part of a model."""

# torch


def open_store() -> Any:
    """Return the store of the rendezvous, with a separate connection.

    A connection on which the main thread waits in a collective would block all other users.
    """
    return _get_default_store().clone()  # type: ignore[attr-defined]


def exchange_in_forward(model: DistributedDataParallel, output: Tensor, *, was_called: bool) -> None:
    """Run the communication of a forward, such as buffers, and expect a backward of this output.

    Processes: collective, with the others' forward, unless this process has run its own.
    """
    if not was_called:
        model._pre_forward()  # type: ignore[no-untyped-call]
    model._post_forward(output)  # type: ignore[no-untyped-call]


def multiply_(tensors: list[Tensor], factor: float) -> None:
    """Multiply tensors in place, in as few kernels as possible."""
    torch._foreach_mul_(tensors, factor)


def count_writes(tensor: Tensor) -> int:
    """Return how often a tensor was written in place, from autograd's version counter."""
    return tensor._version


def has_gradient_hook(parameter: Tensor) -> bool:
    """Return whether a tensor has a hook from `register_post_accumulate_grad_hook`, which may use its gradient."""
    return bool(parameter._post_accumulate_grad_hooks)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's direct buffers: the dict itself, so that they can be replaced."""
    return module._buffers


def is_saved(module: nn.Module, buffer: str) -> bool:
    """Return whether a module's state dict includes a buffer."""
    return buffer not in module._non_persistent_buffers_set


def is_compiled(model: nn.Module) -> bool:
    """Return whether `model.compile()` was called."""
    return model._compiled_call_impl is not None


def arguments_of(operation: Any) -> list[str]:
    """Return the names of the arguments of one of torch's operations."""
    return [argument.name for argument in operation._schema.arguments]


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Hide computations in this context from observers of torch's operations, such as operation counters."""
    from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

    return _disable_current_modes() if _get_current_dispatch_mode_stack() else nullcontext()


def mark_rows_dynamic(tensors: list[Tensor]) -> None:
    """Mark the first dimension of tensors as dynamic for the compiler, and the others as static."""
    from torch._dynamo import mark_static, maybe_mark_dynamic

    for tensor in tensors:
        maybe_mark_dynamic(tensor, 0)
        for dimension in range(1, tensor.ndim):
            mark_static(tensor, dimension)


def allow_graphs(number: int) -> None:
    """Set how many graphs of a function the compiler may create; by default it gives up after 8."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, number)


def compile_in_place(model: nn.Module, **kwargs: Any) -> None:
    """Compile a model in place; the object and the names of its weights stay the same.

    `Module.compile` does this too, but the compiler skips the code of torch.nn itself, so that it silently compiles
    nothing of an `nn.Sequential`. Here it compiles a function of accmt, into which it inlines the model.

    Args:
        kwargs: For `torch.compile`.
    """
    if not type(model).forward.__module__.startswith("torch.nn."):
        model.compile(**kwargs)
        return

    def call(*inputs: Any, **named: Any) -> Any:
        return model._call_impl(*inputs, **named)  # type: ignore[no-untyped-call]

    model._compiled_call_impl = torch.compile(call, **kwargs)


@contextmanager
def looking_at_compiled_calls(model: nn.Module, look: Callable[..., Any]) -> Iterator[None]:
    """Call `look(model, args, kwargs, outputs)` after each call of a compiled model; hooks would be compiled too."""
    compiled: Any = model._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        outputs = compiled(*args, **kwargs)
        look(model, args, kwargs, outputs)
        return outputs

    model._compiled_call_impl = call
    try:
        yield
    finally:
        model._compiled_call_impl = compiled


def note_optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark the optimizer as stepped; a scheduler that steps before its optimizer warns.

    Source: `LRScheduler.step` in torch/optim/lr_scheduler.py.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


@contextmanager
def left_out_by_ddp(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Exclude parameters with these names from a DistributedDataParallel that is built in this context."""
    attribute = "_ddp_params_and_buffers_to_ignore"
    before = getattr(model, attribute, ())
    setattr(model, attribute, [*before, *names])  # like `_set_params_and_buffers_to_ignore_for_model`
    try:
        yield
    finally:
        if before:
            setattr(model, attribute, before)
        else:
            delattr(model, attribute)


def note_trained_parameters(model: DistributedDataParallel) -> None:
    """Update which parameters DistributedDataParallel considers trainable, as it does when it is unpickled.

    Processes: collective.

    Source: `DistributedDataParallel.__setstate__` in torch/nn/parallel/distributed.py.
    """
    wrapper: Any = model  # these methods have no types
    wrapper._remove_autograd_hooks()
    parameters, expect_sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, expect_sparse, names, model.static_graph)
    # The new reducer knows nothing of the graph or of the hooks that were set on the old one.
    if model.static_graph:
        model.reducer._set_static_graph()
        wrapper._static_graph_delay_allreduce_enqueued = False
    for hook, state in model._comm_hooks:
        for memory in ("error_dict", "p_memory_dict", "q_memory_dict"):  # of PowerSGD, by bucket number
            getattr(state, memory, {}).clear()
        dist._register_comm_hook(model.reducer, state, hook)  # type: ignore[attr-defined]


def states_of_comm_hooks(model: DistributedDataParallel) -> list[Any]:
    """Return the states of a wrapped model's communication hooks."""
    return [state for _, state in model._comm_hooks]


def workers_of(batches: Any) -> list[Any]:
    """Return the worker processes of a `DataLoader` iterator."""
    return list(getattr(batches, "_workers", ()))


def shut_down_workers(dataloader: DataLoader[Any], batches: Any) -> None:
    """Shut down an iterator's worker processes, and detach it from the loader."""
    if hasattr(batches, "_shutdown_workers"):  # an iterator without workers has none
        batches._shutdown_workers()
    dataloader._iterator = None


# Accelerate


def prepare_alone(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Prepare a model without an optimizer; before 1.14 Accelerate does not record that."""
    prepared: nn.Module = accelerator.prepare_model(model, evaluation_mode=True)
    marked: Any = prepared
    marked._is_accelerate_prepared = True
    return prepared


def is_prepared(model: nn.Module) -> bool:
    """Return whether Accelerate has prepared a model."""
    return "_is_accelerate_prepared" in vars(model)


def forget_prepared(model: nn.Module, wrapped: nn.Module, accelerator: Accelerator) -> None:
    """Undo the preparation of a model, and remove its wrapper from the Accelerator."""
    vars(model).pop("_is_accelerate_prepared", None)
    if wrapped in accelerator._models:
        accelerator._models.remove(wrapped)


def forget_accelerator() -> None:
    """Forget the program's Accelerators, in a fork that joins other processes than the program did."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def share_other_precision(precision: str) -> None:
    """Set the mixed precision for the program's next Accelerators; existing ones keep theirs.

    Accelerate itself rejects a second precision in a program, or silently keeps the first.
    """
    from accelerate.state import AcceleratorState

    AcceleratorState._shared_state = {**AcceleratorState._shared_state, "_mixed_precision": precision}


def use_fsdp(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Use FSDP2 in an Accelerator of CPU processes, as `AcceleratorState.__init__` does for other devices."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


# transformers


def plan_of_tensors(model: nn.Module, size: int) -> dict[str, str]:
    """Return how a model splits its tensors over `size` processes: a style for each parameter and module, by name.

    Raises:
        AttributeError, ImportError, TypeError: It is not a transformers model, or transformers is older than 5.23.
        ValueError: It has no plan.
    """
    from transformers import PreTrainedModel
    from transformers.distributed.configuration_utils import DistributedConfig

    if not isinstance(model, PreTrainedModel):  # the caller names what can be split
        message = "not a PreTrainedModel of transformers"
        raise AttributeError(message)
    untyped: Any = model
    plans: tuple[dict[str, str], ...] = untyped._resolve_parallel_plans(DistributedConfig(tp_size=size))
    return plans[0]


def layers_to_shard(model: nn.Module) -> tuple[str, ...]:
    """Return the classes of layers that a transformers model declares to be sharded separately."""
    return tuple(getattr(model, "_no_split_modules", None) or ())


def draw_first_values(model: nn.Module, around: Around) -> None:
    """Initialize all parts of a transformers model in its own order, each within a context."""
    pretrained: Any = model
    for part in model.modules():
        vars(part).pop("_is_hf_initialized", None)  # set when the empty model was built; such parts would be skipped
    with _drawing_within(around):
        pretrained.initialize_weights()


def has_first_value(parameter: Tensor) -> bool:
    """Return whether transformers has loaded a parameter, and therefore does not initialize it."""
    return getattr(parameter, "_is_hf_initialized", False)


@contextmanager
def distributing_as_read(distribute: Callable[[nn.Module], None], around: Around) -> Iterator[None]:
    """Let `from_pretrained(distributed_config=...)` distribute models with `distribute` instead of its own code.

    Args:
        distribute: Called with a model without values, before its weights are read.
        around: The context in which each part's values that are missing in the files are initialized.
    """
    from transformers import PreTrainedModel

    kind: Any = PreTrainedModel

    def distribute_instead(_: type, model: nn.Module, *_config: Any) -> nn.Module:
        distribute(model)
        return model

    kind.maybe_distribute_model = classmethod(distribute_instead)
    try:
        with _drawing_within(around):
            yield
    finally:
        del kind.maybe_distribute_model  # inherited again


@contextmanager
def _drawing_within(around: Around) -> Iterator[None]:
    from transformers import PreTrainedModel

    kind: Any = PreTrainedModel
    original = kind._initialize_weights

    def initialize(model: Any, part: nn.Module, _: object = None) -> None:
        kind_of_model: Any = class_of(model)  # FSDP2's class is not in transformers, and would count as custom code
        is_custom = getattr(kind_of_model, "is_custom_code", kind_of_model.is_remote_code)  # as in transformers 5.4
        with around(part):
            original(model, part, is_custom())

    kind._initialize_weights = initialize
    try:
        yield
    finally:
        kind._initialize_weights = original


def generate_together(model: nn.Module) -> None:
    """Run `generate` on each process until all have finished, because a sharded model's forward needs all of them."""
    marked: Any = model
    marked._is_fsdp_managed_module = True


def names_not_saved(model: PreTrainedModel) -> set[str]:
    """Return the weights that a model declares not to save."""
    return set(model._keys_to_ignore_on_save or ())


def attention_of(model: Any) -> str | None:
    """Return a transformers model's attention implementation, such as "sdpa"; None for any other model."""
    implementation: str | None = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return implementation


# datasets


def steps_of_stream(stream: Any) -> list[Any]:
    """Return the steps of a streaming dataset (read, filter, shuffle, ...), which contain its state."""
    steps = [stream._ex_iterable]
    for step in steps:  # grows meanwhile
        steps += [*getattr(step, "ex_iterables", ()), *filter(None, [getattr(step, "ex_iterable", None)])]
    return steps


def split_of_stream(stream: Any) -> tuple[int, int] | None:
    """Return the index and number of parts if `split_dataset_by_node` has split a streaming dataset."""
    split = getattr(stream, "_distributed", None)
    return None if split is None else (split.rank, split.world_size)


# torchmetrics


def reduction_of(metric: torchmetrics.Metric, state: str) -> Any:
    """Return the function that reduces a state over processes; None if each process keeps its own."""
    return metric._reductions[state]


def set_update_count(metric: torchmetrics.Metric, count: int) -> None:
    """Set a metric's update count."""
    metric._update_count = count


def count_collectives(*, leaving_out: Iterable[str] = ()) -> dict[str, int]:
    """Return how many collectives this process has started in each group, except in the groups with these names."""
    from torch.distributed.distributed_c10d import _world

    if not dist.is_initialized():
        return {}
    counted: dict[str, int] = {}
    for group in list(_world.pg_map):
        if group.group_name not in leaving_out:
            ranks = list(_world.pg_group_ranks[group])
            name = f"{group.group_name} of {len(ranks)} from {min(ranks)}"  # groups of a mesh may share a name
            counted[name] = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return counted
