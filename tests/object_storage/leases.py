"""Tests of the lease on a remote folder, which each store runs; a store is the fixture `bucket`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from accmt.addons.remote_checkpoints import Lease, RemoteFolder
from accmt.errors import CheckpointError
from tests.object_storage.runs import URL

LEASE = "bucket/run/lease.json"


class LeaseTests:
    heartbeat_s, expires_after_s = 0.2, 1.5

    def test_a_second_run_is_refused_until_the_lease_has_expired(
        self, bucket: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Lease, "HEARTBEAT_S", self.heartbeat_s)
        monkeypatch.setattr(Lease, "EXPIRES_AFTER_S", self.expires_after_s)
        first, second = Lease(RemoteFolder(URL), "first"), Lease(RemoteFolder(URL), "second")
        second._content["machine"] = "another"
        first.take()
        with pytest.raises(CheckpointError, match="in use by run first"):
            second.take()
        first._stopping.set()  # its machine is gone
        assert first._thread is not None
        first._thread.join()
        with second:
            assert json.loads(bucket.cat_file(LEASE))["run"] == "second"
        assert not bucket.exists(LEASE)

    def test_of_two_runs_that_ask_at_once_one_gets_it(self, bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        first, second = Lease(RemoteFolder(URL), "first"), Lease(RemoteFolder(URL), "second")
        with first:
            answers = iter([None, first._read()])  # when it was asked first, nobody had it
            monkeypatch.setattr(second, "_read", lambda: next(answers))
            with pytest.raises(CheckpointError, match="in use by run first"):
                second.take()
        assert not bucket.exists(LEASE)
