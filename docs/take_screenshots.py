"""Train a small run and take pictures of it in headless Chromium: progress bar, report and MLflow.

python docs/take_screenshots.py
"""

from __future__ import annotations

import argparse
import contextlib
import html
import json
import os
import pty
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import termios
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
COLUMNS = 126
SCRIPT = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

from accmt import AcceleratorModule, Accuracy, MLFlow, Trainer, set_seed


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
    monitor=["learning_rate", "grad_norm", "checkpoint"],
    log_with=MLFlow,
    run_name="first",
    seed=0,
).fit(Digits(), train, validation)
"""
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
)
TIMEOUT_S = 180.0
"""How long a server may take to answer, and a page to draw what the picture waits for."""

TIDY_MLFLOW = """
document.querySelector('[data-component-id="mlflow.assistant.chat_panel.close"]')?.click();
document.head.insertAdjacentHTML("beforeend", "<style>.modebar { display: none }</style>");
"""
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
        size = (1110, 28 + 19 * (lines.count("\n") + 1))
        take(arguments.chromium, page.as_uri(), output / "terminal.png", "document.querySelector('pre')", size=size)
        run(folder, "-m", "accmt.cli.main", "report", "logs/digits/first", "-o", "report.html")
        charts = "document.querySelectorAll('.js-plotly-plot .xtick').length > 4"
        take(arguments.chromium, (folder / "report.html").as_uri(), output / "report.png", charts)
        with serve_mlflow(folder) as address:
            take(arguments.chromium, address, output / "mlflow.png", charts, TIDY_MLFLOW)


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


@contextlib.contextmanager
def serve_mlflow(folder: Path) -> Iterator[str]:
    """Serve MLflow, and yield the address of the run's metrics."""
    database = folder / "logs" / "mlflow.db"
    with contextlib.closing(sqlite3.connect(database)) as connection:
        experiment, run_id = connection.execute("SELECT experiment_id, run_uuid FROM runs").fetchone()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    options = f"--backend-store-uri sqlite:///{database} --port {port} --workers 1"
    command = [sys.executable, "-m", "mlflow", "server", *options.split()]
    server = subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        page = f"experiments/{experiment}/runs/{run_id}/model-metrics?workflowType=machine_learning"
        yield f"http://127.0.0.1:{port}/#/{page}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


class Browser:
    """A page in Chromium, controlled over pipes by the DevTools protocol."""

    def __init__(self, chromium: str, profile: str) -> None:
        read_end, self._commands = os.pipe()
        answers, write_end = os.pipe()
        script = f'exec "$0" "$@" 3<&{read_end} 4>&{write_end}'  # where Chromium expects its pipes
        command = ["bash", "-c", script, chromium, *FLAGS.split(), f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(command, pass_fds=(read_end, write_end), stderr=subprocess.DEVNULL)
        os.close(read_end)
        os.close(write_end)
        self._answers = os.fdopen(answers, "rb")
        self._count = 0
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            pass  # an event
        if "error" in answer:
            raise SystemExit(f"{method}: {answer['error']}")
        return answer["result"]

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression on the page."""
        return self.call("Runtime.evaluate", expression=expression)["result"].get("value")

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            if not byte:
                raise SystemExit("Chromium has exited")
            text += byte
        return json.loads(text)


def wait_until(condition: Callable[[], bool], error: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{error} after {TIMEOUT_S:.0f} s")
        time.sleep(1)


def take(
    chromium: str, address: str, path: Path, shown: str, then: str = "", size: tuple[int, int] = (1400, 900)
) -> None:
    """Take a picture of a page: when the JavaScript expression `shown` is true there, run `then` first."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(chromium, profile)
        width, height = size
        browser.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        wait_until(lambda: "errorText" not in browser.call("Page.navigate", url=address), f"no answer from {address}")
        wait_until(lambda: browser.evaluate(f"!!({shown})"), f"{address} does not show {shown}")
        browser.evaluate(then)
        time.sleep(2)  # until animations end
        path.write_bytes(b64decode(browser.call("Page.captureScreenshot", format="png")["data"]))
        browser.call("Browser.close")
        browser.process.wait()
    print(f"{path.name}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
