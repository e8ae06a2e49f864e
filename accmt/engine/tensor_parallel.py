"""Which processes share each batch, because the tensors of a model are split over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from accmt.engine.shards import is_by_fsdp
from accmt.errors import ModuleContractError, fail
from accmt.libraries.versions import parallel_size
from accmt.processes import num_processes, process_index
from accmt.sharded_tensors import mesh_of

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from torch.distributed.device_mesh import DeviceMesh

_NAME = "tp"
_WHERE = 'Trainer(parallelism={"tp": ...})'


def config_of(accelerator: Accelerator) -> ParallelismConfig | None:
    """Return the sizes of an Accelerator's device mesh, or None."""
    config: ParallelismConfig | None = accelerator.state.parallelism_config
    return config


def tensor_parallel_size(accelerator: Accelerator) -> int:
    """Return the number of processes that each tensor of a model is to be split over; 1 if it is not split."""
    config = config_of(accelerator)
    return 1 if config is None else parallel_size(config, "tp")


def ranks_of_batch(model: nn.Module, asked: int) -> int:
    """Return how many processes share each batch: those over which tensors of the model are or will be split.

    Args:
        model: The model, split or not.
        asked: The size requested by the run, 1 if there is none.

    Raises:
        ModuleContractError: The model is split over processes that are not neighbors, or with another size.
    """
    by_fsdp = is_by_fsdp(model)
    meshes: dict[int, DeviceMesh] = {}
    for parameter in model.parameters():
        mesh = _mesh_of_split(parameter, by_fsdp=by_fsdp)
        if mesh is not None:
            meshes[id(mesh)] = mesh
    if not meshes:
        return asked
    size = max(mesh.size() for mesh in meshes.values())
    first = process_index() // size * size
    groups = [mesh.mesh.flatten().tolist() for mesh in meshes.values()]
    if asked not in (1, size):  # splitting it again would need the whole tensors
        got = f"a model that is already split over {size} processes, while {asked} are requested"
        do = f'parallelism={{"{_NAME}": {size}}}'
        raise fail(ModuleContractError, _WHERE, got=got, expected="the same size", do=do)
    # Batches are numbered by groups of neighbors: other processes would see other samples than the rest of their model.
    neighbors = list(range(first, first + size))
    if any(group != neighbors for group in groups) or num_processes() % size:
        expected = f"processes {first} to {neighbors[-1]} together, like the last dimension of a mesh over all "
        expected += "processes"
        got = f"a model that is already split over the processes {groups[0]}"
        do = 'init_device_mesh(device, (shard, tp), mesh_dim_names=("shard", "tp"))'
        raise fail(ModuleContractError, "self.model", got=got, expected=expected, do=do)
    return size


def _mesh_of_split(parameter: Tensor, *, by_fsdp: bool) -> DeviceMesh | None:
    """Return the device mesh over which a tensor is split for tensor parallelism, or None.

    It is the mesh dimension "tp" or, if FSDP2 has not sharded the model, a mesh without dimension names.
    """
    mesh = mesh_of(parameter)
    if mesh is None:
        return None
    if mesh.mesh_dim_names is not None:
        return mesh[_NAME] if _NAME in mesh.mesh_dim_names else None
    return None if by_fsdp else mesh
