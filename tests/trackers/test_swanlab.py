"""SwanLab, read back from the file that `swanlab sync` uploads, by SwanLab's own reader."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from accmt import SwanLab
from accmt.tracking import Tracking
from tests.trackers.contract import TrackerContract


def records(tracking: Tracking) -> Iterator:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    for path in sorted((tracking.run_folder / "swanlab").glob("run-*/*.swanlab")):
        if path.stat().st_size:
            reader = DataStoreReader()
            reader.open(path)
            yield from map(Record.FromString, reader)
            reader.close()


class TestSwanLab(TrackerContract):
    kind = SwanLab
    kinds = ("images",)
    switch = {"SWANLAB_MODE": "offline"}
    statuses = {"FINISHED": "FINISHED", "FAILED": "CRASHED", "KILLED": "ABORTED", "PREEMPTED": "ABORTED"}

    def points(self, tracking, name="loss"):
        scalars = [one.scalar for one in records(tracking) if one.HasField("scalar")]
        return sorted((one.step, one.value.number) for one in scalars if one.key == name)

    def media(self, tracking, kind):
        media = [one.media for one in records(tracking) if one.HasField("media")]
        return {one.key: len(one.value.items) for one in media}

    def config(self, tracking):
        *_, path = sorted((tracking.run_folder / "swanlab").glob("run-*/files/config.yaml"))
        return {name: one["value"] for name, one in yaml.safe_load(path.read_text()).items()}

    def status(self, tracking):
        *_, last = (one.finish for one in records(tracking) if one.HasField("finish"))
        return (
            type(last)
            .DESCRIPTOR.fields_by_name["state"]
            .enum_type.values_by_number[last.state]
            .name.removeprefix("RUN_STATE_")
        )
