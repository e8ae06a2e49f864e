"""Verify every file of a checkpoint, or of all checkpoints in a folder, and print their contents.

This does not write, rename or load anything. Exit code: 0 all are complete, 1 one is damaged, 2 there is no checkpoint.

Of a remote folder (a URL such as s3://bucket/run), manifests and sizes are checked; a resume verifies every file after
the download. `--clean` deletes what uploads that were never finished have left there.

With `--against`, PATH is a model folder (or an adapter's), and what serves it is compared with it: chat template, stop
token, tokenizer, log-probabilities of answers. EXPORT is a file or folder, for vllm the URL of a server. Exit code: 0
the same, 1 a part differs, 2 it cannot be compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accmt.addons.inspection import Inspection
    from accmt.checkpoint.manifest import Manifest

DAMAGED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint folder, or a folder of checkpoints, possibly a URL")
    parser.add_argument("--clean", action="store_true", help="delete what unfinished uploads have left; only for a URL")
    pair = ("gguf|onnx|merged|vllm", "EXPORT")
    parser.add_argument("--against", nargs=2, metavar=pair, help="compare the model in PATH with an export of it")
    rows = "rows whose answers --against compares, as for `accmt sft`; default: built-in conversations"
    parser.add_argument("--data", metavar="ROWS.jsonl", help=rows)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    from accmt.addons.inspection import find_resumable, inspect
    from accmt.errors import ArgumentError, fail
    from accmt.files import dumps

    if options.against is not None:
        return _compare(options)
    if options.data is not None:
        expected, do = "--against with an export", "--against merged FOLDER, or leave out --data"
        raise fail(ArgumentError, "--data", got="no --against", expected=expected, do=do)
    if "://" in options.path:
        return _check_remote(options)
    found = inspect(Path(options.path))
    resumable = find_resumable(found)
    if options.json:
        resume_from = str(resumable.folder) if resumable else None
        print(dumps({"checkpoints": [_describe(one) for one in found], "resume_from": resume_from}, indent=2))
    else:
        print("\n\n".join(_write(one) for one in found))
        if found[0].folder != Path(options.path):
            print(f"\nresume uses {resumable.folder.name if resumable else 'none of them'}")
    return 0 if all(one.is_complete for one in found) else DAMAGED


def _compare(options: argparse.Namespace) -> int:
    from accmt.addons.served.parts import DIFFERS, compare
    from accmt.files import dumps

    kind, export = options.against
    parts = []
    for part in compare(options.path, kind, export, options.data):
        parts.append(part)
        if not options.json:
            print(f"{part.name}: {part.state}" + (f": {part.detail}" if part.detail else ""), flush=True)
    differing = [part for part in parts if part.state == DIFFERS]
    # Log-probabilities are what differs, and the part after them why.
    first = next((part for part in differing if part.name != "log-probabilities"), None)
    if options.json:
        rows = [part._asdict() for part in parts]
        print(dumps({"parts": rows, "first_difference": first and first.name}, indent=2))
    elif first is not None:
        print(f"\nfirst difference: {first.name}\n  do: {first.do}")
    return DAMAGED if differing else 0


def _check_remote(options: argparse.Namespace) -> int:
    from accmt.addons.remote_checkpoints import RemoteFolder, clean, explaining
    from accmt.errors import NoCheckpointError, fail
    from accmt.files import dumps

    if options.clean:
        for name in clean(options.path):
            print(f"deleted {name}: its upload was not finished")
    with explaining(options.path):
        remote = RemoteFolder(options.path)
        found = remote.checkpoints()
    if not found:
        do = "check the URL"
        raise fail(NoCheckpointError, remote.shown, got="no checkpoints", expected="a folder of checkpoints", do=do)
    if options.json:
        rows = [{"name": one.name, "is_complete": not one.problem, "problem": one.problem} for one in found]
        print(dumps({"checkpoints": rows}, indent=2))
    else:
        for one in found:
            size = sum(one.sizes.values())
            print(f"{one.name}: {one.problem or 'complete'}, {size:,} bytes{', pinned' if one.is_pinned else ''}")
    return DAMAGED if any(one.problem for one in found) else 0


def _describe(one: Inspection) -> dict[str, Any]:
    from dataclasses import asdict

    head = {
        "folder": str(one.folder),
        "is_complete": one.is_complete,
        "is_pinned": one.is_pinned,
        "faults": list(one.faults),
        "num_tensors": one.num_tensors,
        "num_model_values": one.num_values,
    }
    return head if one.manifest is None else {**head, **asdict(one.manifest)}


def _write(one: Inspection) -> str:
    pinned = ", pinned" if one.is_pinned else ""
    lines = [f"{one.folder}: {'complete' if one.is_complete else 'DAMAGED'}{pinned}"]
    lines += [f"  ! {fault}" for fault in one.faults]
    if one.manifest is not None:
        rows = list(_rows(one, one.manifest))
        width = max(len(name) for name, _ in rows)
        lines += [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join(lines)


def _rows(one: Inspection, manifest: Manifest) -> Iterator[tuple[str, str]]:
    yield "step", f"{manifest.step:,}"
    for name, value in manifest.info.items():
        if isinstance(value, str | int | float) and name != "global_step":  # the same as "step"
            yield name, str(value)
    yield "written", f"{manifest.time} by {manifest.processes} process(es), {manifest.threads} thread(s) each"
    yield "versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    if one.is_complete:
        yield "tensors", f"{one.num_tensors:,}; those of the model have {one.num_values:,} values"
    for name, entry in manifest.files.items():
        yield name, f"{entry.size:,} bytes"
