"""Each private name of a library that accmt uses, alone: the test that fails names the function that needs mending."""

from __future__ import annotations

import ast
import copy
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import accmt
from accmt.libraries import private_names as names

PACKAGE = Path(accmt.__file__).parent
HOME = PACKAGE / "libraries" / "private_names.py"
OF_PYTHON = {"_exit", "_current_frames", "_getframe", "_actions", "_asdict", "_fields", "_typeshed"}


def used_private_names(path: Path) -> set[str]:
    """Return the attributes that begin with an underscore, and the imports of such names from other packages."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("accmt", "__future__")):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found |= {part for part in parts if part.startswith("_")}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and str(name.value).startswith("_"):
                found.add(str(name.value))
    return {name for name in found if not (name.startswith("__") and name.endswith("__"))}


def own_private_names() -> set[str]:
    """Return the names with an underscore that accmt itself defines."""
    own = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in (inner for one in targets for inner in ast.walk(one)):
                    if isinstance(target, ast.Name):
                        own.add(target.id)
                    elif isinstance(target, ast.Attribute) and ast.unparse(target.value) in ("self", "cls", "hps"):
                        own.add(target.attr)
    return own


def test_private_names_of_libraries_are_used_in_one_file_only():
    own = own_private_names() | OF_PYTHON
    paths = [path for path in PACKAGE.rglob("*.py") if path != HOME]
    offenders = {str(path.relative_to(PACKAGE)): used_private_names(path) - own for path in paths}
    assert {name: found for name, found in offenders.items() if found} == {}


def test_the_search_sees_attributes_imports_and_names_in_strings(tmp_path):
    path = tmp_path / "file.py"
    path.write_text(
        "from torch._C import Store\nfrom torch.nn import _reduction\ngetattr(x, '_one')\ny._two\nz.__dict__\n",
        encoding="utf-8",
    )
    assert used_private_names(path) == {"_C", "_reduction", "_one", "_two"}


def count_graphs() -> int:
    """Return the number of graphs that the compiler has created in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def missing(library: str, name: str, function: str) -> str:
    return f"{library} no longer has {name}: mend `{function}` in accmt/libraries/private_names.py"


# torch


def test_torch_counts_the_collectives_of_each_group(tmp_path):
    assert names.count_collectives() == {}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        before = names.count_collectives()
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), group=group)
        dist.all_reduce(torch.ones(1), group=group)
        after = names.count_collectives()
        what = missing("torch", "_get_sequence_number_for_group", "count_collectives")
        assert sorted(after[name] - before[name] for name in after) == [1, 2], what
        assert len(names.count_collectives(leaving_out={group.group_name})) == 1
    finally:
        dist.destroy_process_group()


@pytest.fixture
def alone(tmp_path):
    """Let this process be a group by itself."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_torch_gives_a_second_connection_to_its_store(alone):
    store, other = names.open_store(), names.open_store()
    assert store is not other
    store.set("place", "here")
    assert other.get("place") == b"here", missing("torch", "_get_default_store().clone()", "open_store")


def test_torch_takes_part_in_a_forward_and_backward_without_inputs(alone):
    model = torch.nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    zero = sum(parameter.sum() for parameter in model.parameters()) * 0.0
    names.exchange_in_forward(model, zero, was_called=False)
    zero.backward()
    for parameter in model.parameters():
        assert not parameter.grad.any(), missing("torch", "_pre_forward and _post_forward", "exchange_in_forward")


@pytest.mark.slow
def test_torch_keeps_the_compiled_call_of_a_model_where_another_may_stand():
    seen, model = [], torch.nn.Linear(2, 1)
    names.compile_in_place(model, backend="eager")
    compiled = model._compiled_call_impl
    with names.looking_at_compiled_calls(model, lambda *call: seen.append(call)):
        outputs = model(torch.ones(1, 2))
    assert [one[3] is outputs for one in seen] == [True], missing(
        "torch", "_compiled_call_impl", "looking_at_compiled_calls"
    )
    model(torch.ones(1, 2))
    assert len(seen) == 1
    assert model._compiled_call_impl is compiled


@pytest.mark.slow
def test_torch_takes_the_number_of_rows_for_one_that_varies():
    torch._dynamo.reset()
    before = count_graphs()
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    for rows in (3, 4, 5):
        batch = torch.ones(rows, 7)
        names.mark_rows_dynamic([batch])
        compiled(batch)
    assert count_graphs() == before + 1, missing("torch", "maybe_mark_dynamic", "mark_rows_dynamic")


@pytest.mark.slow
def test_torch_makes_as_many_graphs_as_are_allowed():
    from torch._dynamo import config

    with config.patch(recompile_limit=2):
        names.allow_graphs(1)
        assert config.recompile_limit == 2, "no fewer than before"
        names.allow_graphs(5)
        torch._dynamo.reset()
        before = count_graphs()
        compiled = torch.compile(lambda x, number: x * number, backend="eager", dynamic=False)
        for number in range(2, 7):
            compiled(torch.ones(3), number)
        assert count_graphs() == before + 5, missing("torch", "recompile_limit", "allow_graphs")
    torch._dynamo.reset()


class _Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, inputs):
        return self.layer(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("build", [lambda: nn.Linear(2, 1), lambda: nn.Sequential(nn.Linear(2, 1), nn.ReLU()), _Own])
def test_torch_compiles_every_model_in_place(build):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = build()
    before, expected = list(model.state_dict()), model(torch.ones(3, 2))
    names.compile_in_place(model, backend=backend)
    assert torch.equal(model(torch.ones(3, 2)), expected)
    assert len(graphs) == 1, missing("torch", "Module._call_impl", "compile_in_place")
    assert names.is_compiled(model)
    assert list(copy.deepcopy(model).state_dict()) == list(model.state_dict()) == before


@pytest.mark.parametrize("before", [[], ["0.bias"]])
def test_torch_leaves_out_parameters_by_name(alone, before):
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    if before:
        model._ddp_params_and_buffers_to_ignore = list(before)
    with names.left_out_by_ddp(model, ["1.weight"]):
        wrapped = nn.parallel.DistributedDataParallel(model)
    said = missing("torch", "DDP._ddp_params_and_buffers_to_ignore", "left_out_by_ddp")
    assert wrapped.parameters_to_ignore == {*before, "1.weight"}, said
    assert getattr(model, "_ddp_params_and_buffers_to_ignore", []) == before


def test_torch_notes_the_parameters_of_a_static_graph_with_its_hooks(alone):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), static_graph=True)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    state.error_dict[0] = torch.ones(1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    assert names.states_of_comm_hooks(model) == [state], missing("torch", "DDP._comm_hooks", "states_of_comm_hooks")
    names.note_trained_parameters(model)
    assert names.states_of_comm_hooks(model) == [state]
    assert state.error_dict == {}, missing("torch", "DDP._comm_hooks", "note_trained_parameters")
    model(torch.ones(1, 4)).sum().backward()


# Accelerate


def test_accelerate_shards_a_model_on_cpu_processes(alone):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.tensor import DTensor

    accelerator, model = Accelerator(cpu=True), nn.Sequential(nn.Linear(2, 2))
    names.use_fsdp(accelerator, FullyShardedDataParallelPlugin(fsdp_version=2))
    assert accelerator.is_fsdp2, missing("accelerate", "PartialState._shared_state", "use_fsdp")
    fsdp2_prepare_model(accelerator, model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


# transformers


@pytest.fixture
def qwen():
    pytest.importorskip("transformers", minversion="5.23")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=8, intermediate_size=8, head_dim=4, **sizes))


def test_transformers_has_a_plan_for_tensor_parallelism(qwen, tiny):
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = names.plan_of_tensors(qwen, 2)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert plan[name] == "colwise", missing("transformers", "_resolve_parallel_plans", "plan_of_tensors")
    assert callable(apply_tensor_parallelism)
    with pytest.raises(ValueError, match="has no `tp_plan`"):
        names.plan_of_tensors(tiny, 2)
    with pytest.raises(AttributeError, match="not a PreTrainedModel"):
        names.plan_of_tensors(nn.Linear(1, 1), 2)


def test_transformers_draws_the_first_values_of_each_part_within_a_context(tiny):
    seen = []

    @contextmanager
    def around(part):
        seen.append(part)
        yield

    norm = tiny.embeddings.LayerNorm
    nn.init.zeros_(norm.weight)
    names.draw_first_values(tiny, around)
    assert norm.weight.tolist() == [1.0] * 8, missing("transformers", "_is_hf_initialized", "draw_first_values")
    assert {*seen} == {*tiny.modules()}, missing("transformers", "_initialize_weights", "_drawing_within")
    seen.clear()
    tiny.initialize_weights()
    assert seen == []


def test_transformers_lets_a_model_be_distributed_before_its_weights_are_read(tiny, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.23")
    from transformers.distributed.configuration_utils import DistributedConfig

    tiny.save_pretrained(tmp_path)
    given, drawn = [], []

    @contextmanager
    def around(part):
        drawn.extend(name for name, own in part.named_parameters(recurse=False) if not names.has_first_value(own))
        yield

    with names.distributing_as_read(given.append, around):
        kind = transformers.BertForSequenceClassification
        model = kind.from_pretrained(tmp_path, distributed_config=DistributedConfig())
    assert given == [model], missing("transformers", "maybe_distribute_model", "distributing_as_read")
    # "weight" and "bias" of the new head alone: the others were read.
    assert drawn == ["weight", "bias"], missing("transformers", "_is_hf_initialized", "has_first_value")
    kind.from_pretrained(tmp_path, distributed_config=DistributedConfig())
    assert given == [model]


def test_transformers_generates_on_all_processes_together_where_a_model_is_marked():
    from transformers.integrations.fsdp import is_fsdp_managed_module

    model = nn.Linear(1, 1)
    assert not is_fsdp_managed_module(model)
    names.generate_together(model)
    assert is_fsdp_managed_module(model), missing("transformers", "_is_fsdp_managed_module", "generate_together")


@pytest.fixture
def tiny():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    return transformers.BertModel(transformers.BertConfig(vocab_size=8, **sizes))


# datasets


# torchmetrics


def test_torchmetrics_shows_the_states_of_a_metric():
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.CatMetric()
    reduce = names.reduction_of(metric, "value")
    both = reduce([torch.ones(1), torch.ones(2)])
    assert len(both) == 3, missing("torchmetrics", "Metric._reductions", "reduction_of")
    names.set_update_count(metric, 3)
    assert metric.update_count == 3, missing("torchmetrics", "Metric._update_count", "set_update_count")


def test_operations_name_their_arguments():
    what = missing("torch", "_schema", "arguments_of")
    assert names.arguments_of(torch.ops.aten.native_dropout.default) == ["input", "p", "train"], what


def test_a_forked_process_forgets_accelerators(alone):
    from accelerate import Accelerator, PartialState
    from accelerate.state import AcceleratorState

    Accelerator(cpu=True)
    names.forget_accelerator()
    assert not PartialState._shared_state, missing("accelerate", "_reset_state", "forget_accelerator")
    assert not AcceleratorState._shared_state
