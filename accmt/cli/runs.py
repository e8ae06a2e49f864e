"""List the runs in a folder, oldest first: status, steps, best result, start.

With --tree, each fork is below the run that it comes from, with its step and its changes. Exit code: 0, or 2 if the
folder has no runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from accmt.errors import ArgumentError, fail
from accmt.tracking.history import DEFAULT_LOGGING_DIR, HISTORY_FILE

if TYPE_CHECKING:
    from accmt.addons.report import RunRecord

_HEAD = ("run", "status", "steps", "best", "started")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, nargs="?", default=Path(DEFAULT_LOGGING_DIR), help="default: logs")
    parser.add_argument("--tree", action="store_true", help="draw forks below the runs that they come from")


def run(options: argparse.Namespace) -> int:
    from accmt.addons.report import read_run
    from accmt.addons.run_folders import find_run_folders
    from accmt.addons.text_tables import align

    folder = options.folder
    places = [place for place in find_run_folders(folder) if (place / HISTORY_FILE).stat().st_size]
    if not places:
        got = "a folder without runs" if folder.is_dir() else f"no such folder; you are in {Path.cwd()}"
        do = "pass the logging_dir of the runs; Trainer(logging_dir=...) is `logs` by default"
        raise fail(
            ArgumentError,
            f"accmt runs {folder}",
            got=got,
            expected="a folder with runs: <track_name>/<run_name>",
            do=do,
        )
    runs = sorted(map(read_run, places), key=lambda one: one.began)
    rows = list(_draw_tree(runs, folder)) if options.tree else [_describe(one, _name(one, folder)) for one in runs]
    print(*align([_HEAD, *rows]), sep="\n")
    return 0


def _name(run: RunRecord, folder: Path) -> str:
    name = str(run.folder.relative_to(folder))
    return run.name if name == "." else name


def _describe(run: RunRecord, name: str) -> tuple[str, ...]:
    from accmt.addons.run_folders import is_locked

    status = "killed" if run.status == "running" and not is_locked(run.folder) else run.status
    steps = max(run.num_steps, 0 if run.goodput is None else run.goodput.step)
    best = run.best
    loss = str(run.config.get("val_loss_metric_name", "val_loss"))
    saved_by = str(run.config.get("model_saving", "")).removeprefix("best_").replace("valid_loss", loss)
    shown = saved_by if saved_by in best else next(iter(best), None)
    shown_best = "" if shown is None else f"{shown} {best[shown][1]:.5g} at {best[shown][0]:,}"
    return name, status, f"{steps:,}", shown_best, time.strftime("%Y-%m-%d %H:%M", time.localtime(run.began))


def _draw_tree(runs: list[RunRecord], folder: Path) -> Iterator[tuple[str, ...]]:
    from accmt.addons.fork.lineage import find_parent, read_origin

    by_folder = {one.folder.absolute(): one for one in runs}
    children: dict[Path | None, list[RunRecord]] = {}
    for one in runs:
        parent = find_parent(one.folder)
        parent = None if parent is None or parent.absolute() not in by_folder else parent.absolute()
        children.setdefault(parent, []).append(one)

    def draw(one: RunRecord, lead: str, branch: str) -> Iterator[tuple[str, ...]]:
        origin = read_origin(one.folder)
        shown = _name(one, folder)
        if origin is not None:
            shown = f"{one.name if branch else shown} (at {origin.step}: {', '.join(origin.changes) or 'no changes'})"
        yield _describe(one, f"{lead}{branch}{shown}")
        lead += {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        forks = children.get(one.folder.absolute(), [])
        for fork in forks:
            yield from draw(fork, lead, "└─ " if fork is forks[-1] else "├─ ")

    for root in children[None]:
        yield from draw(root, "", "")
