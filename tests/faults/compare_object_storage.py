"""Kills runs whose checkpoints are in object storage, wipes the disk each time, and looks at what is left.

    python tests/faults/compare_object_storage.py --runs 5

Each run is killed three times at random moments, each time with the loss of its disk, and started again by the same
command. A checkpoint of 3 MB is due after each step, which takes 0.2 s. accmt and Lightning use an S3 server (moto),
transformers' Trainer a stand-in of the Hub; each answer takes 50 ms. Needs the packages lightning, s3fs and
moto[s3,server].
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("ACCMT_TEST_WIDTH", "512")  # checkpoints of 3 MB
os.environ.setdefault("ACCMT_TEST_SAMPLE_S", "0.03")  # steps of 0.2 s

from tests.faults import random_kills
from tests.faults.random_kills import KILLS, SCRIPTS, Variant
from tests.hub import Hub

LATENCY_S = 0.05
OF_TRANSFORMERS = ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth")


@dataclass
class Results:
    """What was left after the kills of one trainer's runs.

    Attributes:
        nothing: Kills after which there was no complete checkpoint, though a step had been done.
        lost: Steps lost at each of the other kills.
        torn: The most files of unfinished uploads that were there at once.
        same: Runs whose end was that of the unbroken run, bit for bit.
        seconds: How long the unbroken run trained.
        failed: Runs that could not be continued.
    """

    nothing: int = 0
    lost: list[int] = field(default_factory=list)
    torn: int = 0
    same: int = 0
    failed: int = 0
    seconds: float = 0.0

    def describe(self, runs: int) -> str:
        lost = f"{sum(self.lost) / len(self.lost):.1f} on average, {max(self.lost)} at most" if self.lost else "-"
        return (
            f"no checkpoint after {self.nothing} of {KILLS * runs} kills; steps lost: {lost}; leftovers: {self.torn} "
            f"files; {self.failed} of {runs} runs could not be continued; {self.same} bit-identical; "
            f"the unbroken run took {self.seconds:.1f} s"
        )


def look_at_accmt(name: str) -> tuple[int | None, int]:
    """Return the step of the newest complete checkpoint, and the number of files of unfinished ones."""
    from accmt.addons.remote_checkpoints import RemoteFolder

    found = RemoteFolder(f"{os.environ['ACCMT_TEST_STORE']}/{name}").checkpoints()
    steps = [one.manifest.step for one in found if one.manifest is not None and not one.problem]
    return (steps[-1] if steps else None), sum(len(one.sizes) for one in found if one.problem)


def look_at_lightning(name: str) -> tuple[int | None, int]:
    """As above: `last.ckpt` is what a run continues from."""
    import fsspec

    files = fsspec.filesystem("s3", use_listings_cache=False)
    found = files.find(f"{os.environ['ACCMT_TEST_STORE']}/{name}", detail=True)
    written = {path: entry["LastModified"] for path, entry in found.items()}
    last = max((path for path in written if Path(path).name.startswith("last")), key=written.__getitem__, default=None)
    surplus = max(len([path for path in written if not Path(path).name.startswith("last")]) - 1, 0)
    if last is None:
        return None, surplus
    try:
        step: int = torch.load(io.BytesIO(files.cat_file(last)), weights_only=False)["global_step"]
    except Exception as error:  # noqa: BLE001 - a damaged file raises anything
        print(f"{last} cannot be read: {error}")
        return None, surplus
    return step, surplus


def look_at_hub(hub: Hub) -> tuple[int | None, int]:
    """As above: `last-checkpoint` is what a run continues from."""
    found = {Path(path).name: content for path, content in hub.files.items() if path.startswith("last-checkpoint/")}
    if any(name not in found for name in OF_TRANSFORMERS):
        return None, len(found)
    step: int = json.loads(found["trainer_state.json"])["global_step"]
    optimizer: dict[str, Any] = torch.load(io.BytesIO(found["optimizer.pt"]), weights_only=True)
    if int(optimizer["state"][0]["step"]) != step:
        print(f"the optimizer is from step {optimizer['state'][0]['step']}, the rest from step {step}")
        return None, len(found)
    return step, 0


def compare(trainer: str, look: Callable[[str], tuple[int | None, int]], runs: int, rng: random.Random) -> Results:
    """Kill the runs of a trainer."""
    variant = Variant(trainer, "0", "1", "1", "")
    with tempfile.TemporaryDirectory() as place:
        expected, seconds = random_kills.finish(Path(place), variant)
    assert expected, "the unbroken run failed"
    results = Results(seconds=seconds)
    for number in range(runs):
        folder = Path(tempfile.mkdtemp(prefix=f"{trainer}-"))
        clear_hub()
        for _ in range(KILLS):
            (folder / "step").unlink(missing_ok=True)
            running = random_kills.start(folder, variant)
            random_kills.kill(running, folder, rng.uniform(0, 0.6 * seconds), rng)
            reached = int((folder / "step").read_text() or 0) if (folder / "step").exists() else 0
            step, torn = look(folder.name)
            results.torn = max(results.torn, torn)
            if step is not None:
                results.lost.append(max(reached - step, 0))
            elif reached:
                results.nothing += 1
        result, _ = random_kills.finish(folder, variant)
        results.same += result == expected
        results.failed += not result
        print(f"{trainer}, run {number + 1}: {results}", flush=True)
        shutil.rmtree(folder)
    return results


_hub = Hub(LATENCY_S)


def clear_hub() -> None:
    """Begin with an empty repository."""
    _hub.files.clear()


def main(runs: int, seed: int, trainers: list[str]) -> None:
    """Compare the trainers, and print what was left."""
    random_kills.SCRIPT_OF["lightning"] = SCRIPTS / "killed_lightning_run.py"
    threading.Thread(target=_hub.serve_forever, daemon=True).start()
    os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{_hub.server_port}", "HF_HUB_OFFLINE": "0"}
    os.environ |= {"HF_TOKEN": "hf_token", "ACCMT_TEST_HUB": "user/run"}
    random_kills.start_store(LATENCY_S)
    print(f"seed {seed}")
    looks = {"accmt": look_at_accmt, "transformers": lambda _: look_at_hub(_hub), "lightning": look_at_lightning}
    every = {name: compare(name, looks[name], runs, random.Random(seed)) for name in trainers}
    for name, results in every.items():
        print(f"{name}: {results.describe(runs)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--trainers", nargs="+", default=["accmt", "transformers", "lightning"])
    main(**vars(parser.parse_args()))
