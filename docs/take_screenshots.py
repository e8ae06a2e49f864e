"""Train a small run and take pictures of it in headless Chromium: progress bar and report.

python docs/take_screenshots.py
"""

from __future__ import annotations

import argparse
import contextlib
import html
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
COLUMNS = 126
SCRIPT = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

from accmt import AcceleratorModule, Accuracy, Trainer, set_seed


class Digits(AcceleratorModule):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))

    def step(self, batch):
        images, labels = batch
        scores = self.model(images)
        return {"loss": cross_entropy(scores, labels), "accuracy": (scores.argmax(-1), labels)}


digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16).float(), torch.tensor(digits.target))
train, validation = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
set_seed(0)
hps = {"epochs": EPOCHS, "batch_size": [16, 256], "optim": {"type": "AdamW", "lr": 1e-3}}
Trainer(
    hps,
    "out/digits",
    metrics=Accuracy(),
    model_saving="best_accuracy",
    monitor=["learning_rate", "grad_norm", "throughput", "checkpoint"],
    run_name="first",
    seed=0,
).fit(Digits(), train, validation)
"""
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
)
WAIT = "--virtual-time-budget=60000"
"""For pages that scripts draw: time passes only while nothing is being loaded."""

STYLE = "margin:0;padding:14px;background:#1e1e1e;color:#e4e4e4;font:14px/1.35 'DejaVu Sans Mono',monospace"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chromium", default=shutil.which("chromium") or "chromium")
    parser.add_argument("--output", type=Path, default=IMAGES, help="the folder of the pictures")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    output: Path = arguments.output.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT.replace("EPOCHS", str(arguments.epochs)))
        lines = read_terminal(train_in_terminal(folder))
        page = folder / "terminal.html"
        coloured = html.escape(lines).replace("\x1b[32m", '<span style="color:#4ec94e">').replace("\x1b[0m", "</span>")
        page.write_text(f'<meta charset="utf-8"><body style="{STYLE}"><pre style="margin:0">{coloured}</pre>')
        height = 28 + 19 * (lines.count("\n") + 1)
        take(arguments.chromium, page.as_uri(), output / "terminal.png", (1110, 400))  # lower pages stay empty
        Image.open(output / "terminal.png").crop((0, 0, 1110, height)).save(output / "terminal.png")
        run(folder, "-m", "accmt.cli.main", "report", "logs/digits/first", "-o", "report.html")
        take(arguments.chromium, (folder / "report.html").as_uri(), output / "report.png", (1400, 900), WAIT)


def run(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], cwd=folder, env=environment(), check=True)


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "TERM": "xterm"}


def train_in_terminal(folder: Path) -> str:
    """Train in a terminal, and return all that it was sent."""
    main_end, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (40, COLUMNS))
    process = subprocess.Popen(
        [sys.executable, "train.py"], cwd=folder, env=environment(), stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    sent = b""
    with contextlib.suppress(OSError):  # Linux raises it when the process has closed its end
        while received := os.read(main_end, 65536):
            sent += received
    os.close(main_end)
    if process.wait() != 0:
        raise SystemExit(sent.decode(errors="replace"))
    return sent.decode(errors="replace")


def read_terminal(sent: str) -> str:
    """Return what the terminal showed in the last epoch: the lines of evaluations above the progress bar."""
    shown = [re.sub(r"\x1b\[[0-9;?]*[A-HJKST]", "", part) for part in re.split(r"[\r\n]+", sent)]
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown]
    bars = [index for index, line in enumerate(plain) if re.match(r"epoch \d+/", line)]
    last = bars[3 * len(bars) // 4]  # in the middle of an epoch
    above = [line[line.index("[accmt]") :] for line in plain[:last] if "[accmt] step" in line]
    return "\n".join(["$ python train.py", *above, shown[last]])


def take(chromium: str, address: str, path: Path, size: tuple[int, int], *wait: str) -> None:
    with tempfile.TemporaryDirectory() as profile:
        window = "--window-size={},{}".format(*size)
        command = [
            chromium,
            *FLAGS.split(),
            f"--user-data-dir={profile}",
            window,
            *wait,
            f"--screenshot={path}",
            address,
        ]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=300)
    print(f"{path.name}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
