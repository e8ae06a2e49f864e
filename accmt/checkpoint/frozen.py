"""What a checkpoint leaves out of a model with adapters: the frozen weights around which they are.

They come from elsewhere and do not change, so a checkpoint holds digests of them, and a run that continues from it
builds the model again. Other models' frozen weights are kept: nobody else may have them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accmt.checkpoint.torch_states import plain_parameter_names
from accmt.errors import CheckpointError, explain

_SHOWN = 3


class FrozenWeights:
    """The weights that a model's checkpoints leave out.

    Args:
        model: The model, wrapped or not, as training begins.

    Processes:
        Collective where the model is sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = find_frozen(model)
        self._digests = {name: digest_of(weight) for name, weight in self._weights.items()}
        self._versions = {name: weight._version for name, weight in self._weights.items()}

    def digests(self) -> dict[str, str]:
        """Return the digest of each weight left out, by plain name; one that was trained or changed is not."""
        return {
            name: digest
            for name, digest in self._digests.items()
            if not self._weights[name].requires_grad and self._weights[name]._version == self._versions[name]
        }


def find_frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the frozen parameters of a model that PEFT gave adapters, by plain name; none of another model.

    An adapter that is not active is frozen too, and belongs to what is trained: its parameters have its name in theirs.
    """
    adapters = {name for module in model.modules() for name in getattr(module, "peft_config", None) or ()}
    if not adapters:
        return {}
    return {
        name: parameter
        for name, parameter in plain_parameter_names(model).items()
        if not parameter.requires_grad and adapters.isdisjoint(name.split("."))
    }


def digest_of(weight: Tensor) -> str:
    """Return a fingerprint of a whole tensor, sharded or not (xxh3, 16 hexadecimal digits).

    Processes:
        Collective where it is sharded.
    """
    whole = weight.detach()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    data = whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    digest = xxhash.xxh3_64(f"{whole.dtype} {list(whole.shape)}".encode())
    digest.update(data)
    return digest.hexdigest()


def require_same_frozen(model: nn.Module, saved: Mapping[str, str]) -> None:
    """Check that the weights which a checkpoint left out are those of the model.

    Args:
        model: The model that continues.
        saved: What `FrozenWeights.digests` returned.

    Raises:
        CheckpointError: They are others; the message names some.

    Processes:
        Collective where the model is sharded.
    """
    weights = plain_parameter_names(model) if saved else {}
    others = [name for name, digest in saved.items() if name not in weights or digest_of(weights[name]) != digest]
    if others:
        message = explain(
            "the frozen weights of the model",
            f"{len(others)} of {len(saved)} are not those that were trained around: {', '.join(others[:_SHOWN])}",
            "the same model under the adapter as in the run that saved: a checkpoint holds only the adapter",
            "load the same base model, and seed what it draws (a new head, say), or start anew with `resume=False`",
        )
        raise CheckpointError(message)
