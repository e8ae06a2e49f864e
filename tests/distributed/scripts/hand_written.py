"""The grid of windows.py on a loop written by hand with Accelerate, as its documentation shows it.

    PYTHONPATH=. torchrun --nproc-per-node 2 hand_written.py RESULT.json

`accelerator.prepare` for everything, `accelerator.accumulate`, clipping at `sync_gradients`, the schedule stepped with
the optimizer and its length taken before `prepare`; the loss is the mean that the step returns, since that loop has no
place for a weight.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from tests.distributed.scripts import windows


def run_case(case: windows.Case, accelerator: Accelerator) -> dict[str, Any]:
    """Train one case by hand and return what its updates were made of."""
    accelerator.gradient_accumulation_steps = case.accumulation
    model = windows.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=windows.LR)
    loader = DataLoader(windows.Samples(range(case.samples)), windows.BATCH_SIZE)
    total = max(1, len(loader) * case.epochs // case.accumulation)
    schedule = get_linear_schedule_with_warmup(optimizer, math.ceil(windows.WARMUP * total), total)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    gradients, rates = [], []
    for _ in range(case.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss, _ = windows.compute_loss(model, batch, weighted=case.weighted)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    if case.clip is not None:
                        accelerator.clip_grad_norm_(model.parameters(), case.clip)
                    gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).tolist())
                    rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    accelerator.free_memory()
    return {"gradients": gradients, "learning_rates": rates, "last_lr": optimizer.param_groups[0]["lr"]}


def main() -> None:
    """Run the sized cases of the grid and write the results."""
    warnings.simplefilter("ignore")
    accelerator = Accelerator(cpu=True)
    cases = [case for case in windows.make_cases() if case.data == "sized" and case.micro is None]
    results = {case.name: run_case(case, accelerator) for case in cases}
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(results | {"processes": accelerator.num_processes}))


if __name__ == "__main__":
    main()
