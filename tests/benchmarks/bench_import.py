"""What accmt costs before the first step: its import, and all it builds and checks.

    make bench

The import is that of `from accmt import Trainer, AcceleratorModule` over `import torch`, in seconds. The first step is
timed from the start of the program, in the processor's time, for a loop by hand with Accelerate and for accmt with its
defaults. Each round starts a fresh interpreter for each. The least of the rounds is what the machine needs when nothing
else keeps it busy; the median tells how busy it was.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

ROUNDS = 7
IMPORT = """
from time import perf_counter
import torch
before_s = perf_counter()
from accmt import AcceleratorModule, Trainer
print(perf_counter() - before_s)
"""
BY_HAND = """
from time import process_time
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
accelerator = Accelerator(cpu=True)
samples = TensorDataset(torch.randn(640, 64), torch.randint(10, (640,)))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, 32, shuffle=True))
for inputs, labels in loader:
    accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
    optimizer.step()
    optimizer.zero_grad()
    print(process_time())
    break
"""
BY_ACCMT = """
from time import process_time
import torch
from accmt import AcceleratorModule, Callback, Trainer
from torch import nn
from torch.utils.data import TensorDataset
class Classifier(AcceleratorModule):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    def training_step(self, batch):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])
class First(Callback):
    def on_update_end(self):
        print(process_time())
samples = TensorDataset(torch.randn(640, 64), torch.randint(10, (640,)))
hps = {"max_steps": 1, "batch_size": 32, "optim": {"type": "AdamW", "lr": 1e-3}}
trainer = Trainer(hps, "model", accelerator={"cpu": True}, callbacks=First(), verbose=False)
trainer.fit(Classifier(), samples)
"""


def run(program: str) -> float:
    """Run a program in an empty folder, and return the first number that it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=environment)
    return float(done.stdout.split()[0])


if __name__ == "__main__":
    programs = {"import": IMPORT, "by hand": BY_HAND, "accmt": BY_ACCMT}
    rounds = [{name: run(program) for name, program in programs.items()} for _ in range(ROUNDS + 1)][1:]  # one warms up
    times = {name: [one[name] for one in rounds] for name in programs}
    least = {name: min(values) for name, values in times.items()}
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"import accmt, over import torch: {least['import']:.3f} s (median of {ROUNDS}: {median['import']:.3f} s)")
    print(
        f"first step: accmt {least['accmt']:.2f} s, by hand with Accelerate {least['by hand']:.2f} s, "
        f"{least['accmt'] / least['by hand']:.2f} x (medians: {median['accmt'] / median['by hand']:.2f} x)"
    )
