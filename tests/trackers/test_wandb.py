"""wandb, read back from the file that `wandb sync` uploads, by wandb's own messages."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

from accmt import WandB
from accmt.tracking import Tracking
from tests.trackers.contract import TrackerContract
from tests.trackers.killed import make

BLOCK, HEADER = 32768, 7


def records(tracking: Tracking) -> Iterator:
    """Read all attempts; the files are made of blocks with records that may go over several (LevelDB's log format)."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(tracking.run_folder.glob("wandb/offline-run-*/*.wandb")):
        data, position, parts = path.read_bytes(), HEADER, b""
        while position + HEADER <= len(data):
            if BLOCK - position % BLOCK < HEADER:
                position += BLOCK - position % BLOCK
            length, kind = struct.unpack("<HB", data[position + 4 : position + HEADER])
            parts += data[position + HEADER : position + HEADER + length]
            position += HEADER + length
            if kind in (1, 4):  # whole, or the last part
                yield Record.FromString(parts)
                parts = b""


def values_of(items) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


class TestWandB(TrackerContract):
    kind = WandB
    statuses = {
        "FINISHED": (0, "FINISHED"),
        "FAILED": (1, "FAILED"),
        "KILLED": (255, "KILLED"),
        "PREEMPTED": (143, "PREEMPTED"),
    }
    switch = {"WANDB_MODE": "offline"}

    def points(self, tracking, name="loss"):
        rows = [values_of(one.history.item) for one in records(tracking) if one.HasField("history")]
        return sorted((row["global_step"], float(row[name])) for row in rows if name in row)

    def media(self, tracking, kind):
        if kind == "artifact":
            names = {one.artifact.name for one in records(tracking) if one.HasField("artifact")}
            return names - {f"run-{self.run_id(tracking)}-predictions"}  # in which wandb keeps the table
        values = {}
        for one in records(tracking):
            if one.HasField("history"):
                values |= values_of(one.history.item)
        files = next(tracking.run_folder.glob("wandb/offline-run-*/files"))
        if kind == "table":
            return json.loads((files / values["predictions/path"]).read_text())["data"]
        return {name.removesuffix("/count"): count for name, count in values.items() if name.endswith("/count")}

    def config(self, tracking):
        config = {}
        for one in records(tracking):
            if one.HasField("config"):
                config |= values_of(one.config.update)
        return config

    def status(self, tracking):
        *_, last = (one.exit.exit_code for one in records(tracking) if one.HasField("exit"))
        summaries = (values_of(one.summary.update) for one in records(tracking) if one.HasField("summary"))
        *_, word = (summary["accmt.status"] for summary in summaries if "accmt.status" in summary)
        return last, word

    def doubled_by_a_kill(self):
        return 18  # those of the last two seconds

    def test_both_attempts_have_the_same_id(self, tmp_path):
        state = self.run_until_killed(tmp_path)
        tracking = self.go_on(tmp_path, state)
        ids = {one.run.run_id for one in records(tracking) if one.HasField("run")}
        assert ids == {tracking.run_ids["wandb"]} == set(state["run_ids"].values())
        assert self.config(tracking)["accmt.attempt"] == "2"

    def test_a_run_that_was_preempted_is_marked_so(self, tmp_path):
        for status, is_marked in (("PREEMPTED", True), ("KILLED", False)):
            tracking = make(self.kind, tmp_path, run_name=status)
            tracking.start({})
            tracking.finish(status)
            assert any(one.HasField("preempting") for one in records(tracking)) is is_marked
