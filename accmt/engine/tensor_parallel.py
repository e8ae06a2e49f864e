"""Which processes share each batch, because the tensors of a model are split over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
_ASKED = 'Trainer(parallelism={"tp": ...})'


def config_of(accelerator: Accelerator) -> ParallelismConfig | None:
    """Return the sizes of an Accelerator's device mesh, or None."""
    state: Any = getattr(accelerator, "state", None)
    return getattr(state, "parallelism_config", None)


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
    found = (_mesh_of_split(parameter, by_fsdp=is_by_fsdp(model)) for parameter in model.parameters())
    meshes = {id(mesh): mesh for mesh in found if mesh is not None}
    sizes = {mesh.size() for mesh in meshes.values()}
    if not sizes:
        return asked
    size = max(sizes)
    first = process_index() // size * size
    ranks = [mesh.mesh.flatten().tolist() for mesh in meshes.values()]
    expected = f"processes {first} to {first + size - 1} together, like the last dimension of a mesh over all processes"
    if asked not in (1, size):
        got = f"a model that is already split over {size} processes, while {asked} are requested"
        raise fail(
            ModuleContractError, _ASKED, got=got, expected="the same size", do=f'parallelism={{"{_NAME}": {size}}}'
        )
    if any(of_one != list(range(first, first + size)) for of_one in ranks) or num_processes() % size:
        got = f"a model that is already split over the processes {ranks[0]}"
        do = 'init_device_mesh(device, (shard, tp), mesh_dim_names=("shard", "tp"))'
        raise fail(ModuleContractError, "self.model", got=got, expected=expected, do=do)
    return size


def _mesh_of_split(parameter: Tensor, *, by_fsdp: bool) -> DeviceMesh | None:
    """Return the device mesh over which a tensor is split for tensor parallelism, or None.

    It is the mesh dimension "tp" or, if FSDP2 has not sharded the model, a mesh without dimension names.
    """
    mesh = mesh_of(parameter)
    if mesh is None or mesh.mesh_dim_names is None:
        return None if by_fsdp else mesh
    return mesh[_NAME] if _NAME in mesh.mesh_dim_names else None
