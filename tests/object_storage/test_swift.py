"""Checkpoints and models in a real object store: OpenStack Swift by its S3 protocol."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from accmt.addons import remote_checkpoints
from accmt.addons.remote_checkpoints import RemoteFolder
from accmt.cli.main import main
from accmt.errors import CheckpointError
from accmt.saving import read_status
from tests.object_storage.leases import LeaseTests
from tests.object_storage.runs import URL, steps_in, train
from tests.object_storage.swift_server import ACCESS_KEY, SECRET_KEY, running_swift

pytest.importorskip("swift", reason="Swift is installed by `make object-storage`")


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_swift(tmp_path_factory.mktemp("swift")) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", url)
        fsspec.filesystem("s3").clear_instance_cache()
        yield url
        fsspec.filesystem("s3").clear_instance_cache()


@pytest.fixture
def bucket(swift: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the file system of an empty bucket."""
    monkeypatch.setattr(remote_checkpoints, "_FIRST_PAUSE_S", 0.0)
    files = fsspec.filesystem("s3", use_listings_cache=False)
    files.mkdir("bucket")
    yield files
    files.rm("bucket", recursive=True)


def test_a_run_whose_disk_is_wiped_continues_bit_for_bit(bucket: Any) -> None:
    whole = train(epochs=4, folder="out/whole", checkpoint=None)
    train(epochs=2, checkpoint_options={"max_checkpoints": 2})
    assert len(steps_in(RemoteFolder(URL))) == 2
    shutil.rmtree("out")
    resumed = train(epochs=4)
    assert torch.equal(resumed.model.weight, whole.model.weight)
    assert steps_in(RemoteFolder(URL)) == [8]
    assert not bucket.exists("bucket/run/lease.json")


class TestLease(LeaseTests):
    """On Swift, which answers more slowly."""

    heartbeat_s, expires_after_s = 0.5, 3.0


def test_names_may_have_spaces_and_letters_of_any_language(bucket: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url = "s3://bucket/mes modèles/新闻 1"
    train(epochs=1, folder=url, checkpoint=f"{url}-checkpoints", model_saving="last", run_name="läuft 1")
    assert steps_in(RemoteFolder(f"{url}-checkpoints")) == [2]
    newest = bucket.cat_file(f"{url}/newest").decode()
    bucket.get(f"{url}/{newest}/", "downloaded/", recursive=True)
    assert read_status("downloaded/last") == read_status("out/新闻 1/last")
    assert bucket.cat_file(f"{url}/history/läuft 1.jsonl") == Path("logs/新闻 1/läuft 1/history.jsonl").read_bytes()
    assert main(["check", f"{url}-checkpoints"]) == 0
    assert "complete" in capsys.readouterr().out


def test_a_wrong_region_is_corrected_by_the_client(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("s3").clear_instance_cache()
    with monkeypatch.context() as patch:
        patch.setenv("AWS_DEFAULT_REGION", "eu-west-9")
        train(epochs=1)
    fsspec.filesystem("s3").clear_instance_cache()
    assert steps_in(RemoteFolder(URL)) == [2]


def test_a_wrong_key_is_an_error_before_training(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("s3").clear_instance_cache()
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "another-planted-secret")
        with pytest.raises(CheckpointError, match=r"checkpoint folder s3://bucket/run[\s\S]*check the URL") as error:
            train(epochs=1)
    fsspec.filesystem("s3").clear_instance_cache()
    assert "another-planted-secret" not in str(error.value)
