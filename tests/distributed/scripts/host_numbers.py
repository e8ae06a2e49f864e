"""Sums and sends what is in host memory where the default group reduces tensors of a GPU only, as in a GPU run.

torchrun --nproc-per-node 2 host_numbers.py RESULT.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from accmt.libraries.private_names import open_store
from accmt.processes import (
    broadcast_object,
    gather_objects,
    is_main_process,
    num_processes,
    process_index,
    run_on_every_process,
    run_on_main_process,
    sum_over_processes,
)
from accmt.run.weighting import AccumulationWindow, Weighting


class Devices(TorchDispatchMode):
    """Notes the devices that tensors are made on or copied to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [result] if isinstance(result, torch.Tensor) else []
        self.seen.update(tensor.device.type for tensor in tensors)
        return result


def close_windows() -> list[tuple[float, int]]:
    """Close two windows of unequal weights, the way every step does whose sum of weights is not known beforehand."""
    weighting = Weighting(num_processes())
    weighting.decide(1.0, is_explicit=True)
    closed = []
    for step in (1, 2):
        window = AccumulationWindow(known_samples=None)
        window.add(float(step + process_index()), 3)
        window.add(2.0, 3)
        closed.append(weighting.close(window))
    return closed


def main() -> None:
    """Answer, and write before leaving: a gloo process may abort at interpreter exit."""
    dist.init_process_group("cuda:gloo")
    devices = Devices()
    try:
        dist.all_reduce(torch.ones(1))
        refusal = None
    except RuntimeError as error:
        refusal = str(error)
    with devices:
        answers = {
            "refusal": refusal,
            "sums": sum_over_processes([process_index() + 1, 0.1]),
            "gathered": gather_objects(process_index()),
            "broadcast": broadcast_object(["of", process_index()]),
            "on_main": run_on_main_process(process_index),
            "on_every": run_on_every_process(process_index),
            "windows": close_windows(),
        }
    of_all = gather_objects({**answers, "devices": sorted(devices.seen)})
    rank, store = process_index(), dist.PrefixStore("next", open_store())  # else it has the keys of groups that ended
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    answers_of_next = gather_objects(sum_over_processes([1.0]))
    if is_main_process():
        unfinished = Path(sys.argv[1] + ".tmp")
        unfinished.write_text(json.dumps({"first": of_all, "next": answers_of_next}))
        unfinished.rename(sys.argv[1])
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
