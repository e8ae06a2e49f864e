"""A URL as `model_path`: models that are complete or not there, also when the local disk is lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from fsspec.core import url_to_fs

from accmt import ArgumentError, CheckpointError, read_history
from accmt.addons.remote_checkpoints import Lease, RemoteFolder
from accmt.addons.remote_models import RemoteModelFolder
from accmt.cli.main import main
from accmt.saving import read_status
from tests.raising import raises_at
from tests.toys import Numbers, Scripted, make_trainer


@pytest.fixture
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"file://{tmp_path_factory.mktemp('store')}/modèles and more/news"


def train(url: str, losses: list[float], **settings: Any) -> Any:
    """Train with an evaluation after each epoch, which has the next of the given losses."""
    hps = {"epochs": len(losses), "batch_size": 4}
    settings = {"model_saving": "best_valid_loss", "run_name": "a run", **settings}
    trainer = make_trainer(hps, url, **settings)
    trainer.fit(Scripted(losses), Numbers(8), Numbers(4))
    return trainer


def download(url: str, into: Path) -> Path:
    """Download the newest model as the docs say."""
    files, root = url_to_fs(url)
    newest = files.cat_file(f"{root}/newest").decode()
    files.get(f"{root}/{newest}/", f"{into}/", recursive=True)
    return into


def test_the_best_model_and_the_history_are_uploaded(url: str) -> None:
    trainer = train(url, [3.0, 1.0, 2.0])
    status = read_status(download(url, Path("news")))
    assert status["global_step"] == 4
    assert status == read_status("out/news")
    files, root = url_to_fs(url)
    Path("copy").mkdir()
    files.get_file(f"{root}/history/a run.jsonl", "copy/history.jsonl")
    assert read_history(Path("copy")) == read_history(Path(trainer.log_dir))
    assert not files.exists(f"{root}/lease.json")
    assert not list(Path("out/news").glob(".upload-*"))


def test_an_unfinished_upload_is_never_the_newest(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train(url, [3.0])
    monkeypatch.setattr("accmt.addons.remote_checkpoints._FIRST_PAUSE_S", 0.0)
    whole, number = RemoteFolder._put, 0
    is_over = False
    while not is_over:
        done, is_over = 0, True

        def put(self: Any, file: Path, key: str) -> None:
            nonlocal done, is_over
            done += 1
            if done > number:  # noqa: B023 - called in this round
                is_over = False
                raise OSError("the store is gone")
            whole(self, file, key)

        with monkeypatch.context() as patch:
            patch.setattr(RemoteFolder, "_put", put)
            train(url, [3.0, 2.0], checkpoint=f"ck-{number}", run_name=f"run {number}")
        if not is_over:
            assert read_status(download(url, Path(f"news-{number}")))["global_step"] == 2
        number += 1
    assert number > 3
    assert read_status(download(url, Path("after")))["global_step"] == 4


def test_a_run_on_an_empty_disk_keeps_its_best_model(url: str) -> None:
    settings = {"checkpoint": f"{url}-checkpoints", "checkpoint_every": "1 epoch", "resume": "auto"}
    train(url, [3.0, 1.0], **settings)
    before = read_status("out/news")
    shutil.rmtree("out")
    train(url, [3.0, 1.0, 2.0], **settings)
    assert read_status("out/news") == before
    assert read_status(download(url, Path("news"))) == before
    train(url, [3.0, 1.0, 2.0, 0.5], **settings)
    assert read_status(download(url, Path("better")))["global_step"] == 8


def test_a_best_model_that_was_lost_does_not_keep_worse_ones_away(url: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"checkpoint": f"{url}-checkpoints", "checkpoint_every": "1 epoch", "resume": "auto", "verbose": True}
    train(url, [3.0], **settings)
    train(url, [3.0, 1.0], **settings)  # another run, because only the newest model may be uploaded
    shutil.rmtree("out")
    folder = RemoteModelFolder(url)
    folder.delete(folder.newest_first()[0])  # its upload never finished
    train(url, [3.0, 1.0, 2.0], **settings)
    assert "out/news has an older model than the best by best_valid_loss (1)" in caplog.text
    assert read_status(download(url, Path("news")))["global_step"] == 6


def test_models_of_another_run_are_not_deleted(url: str) -> None:
    for number in range(2):
        train(url, [1.0], run_name=f"run {number}")
    remote = RemoteModelFolder(url)
    remote.prune(0)
    assert [one.manifest.info["run_name"] for one in remote.newest_first() if one.manifest] == ["run 1", "run 0"]


def test_a_second_run_is_refused_before_training(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "HEARTBEAT_S", 0.2)
    lease = Lease(RemoteModelFolder(url), "first")
    lease._content["machine"] = "another"
    lease.take()
    with raises_at(CheckpointError, "model folder file:", "in use by run first"):
        train(url, [1.0])
    lease.release()


def test_accmt_sync_uploads_the_rest(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the store is gone")

    monkeypatch.setattr("accmt.addons.remote_checkpoints._FIRST_PAUSE_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "_put", fail)
        train(url, [1.0], verbose=True)
    assert "a model could not be uploaded to" in caplog.text
    assert RemoteModelFolder(url).newest_first() == []
    assert main(["sync", "out/news"]) == 0
    assert read_status(download(url, Path("news")))["global_step"] == 2
    capsys.readouterr()
    assert main(["sync", "out/news"]) == 0
    assert capsys.readouterr().out == "nothing was left to upload\n"


def test_passwords_in_urls_are_written_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    # A store that takes the password for a part of the path, so that the run succeeds.
    urls = [f"memory://user:planted-password-{name}@store/{name}" for name in ("models", "checkpoints")]
    settings = {"checkpoint": urls[1], "checkpoint_every": "1 epoch", "resume": "auto", "verbose": True}
    train(urls[0], [2.0, 1.0], **settings)
    files, root = url_to_fs(urls[0])
    stored = [name for url in urls for name in files.find(url_to_fs(url)[1])]
    assert len(stored) > 8
    written = b"".join(path.read_bytes() for path in Path().rglob("*") if path.is_file())
    written += b"".join(files.cat_file(name) for name in stored)
    assert b"planted-password" not in written + caplog.text.encode()
    assert files.cat_file(f"{root}/newest").startswith(b"model-00000004-")


def test_models_and_checkpoints_need_different_urls(url: str) -> None:
    with raises_at(ArgumentError, "Trainer(model_path=..., checkpoint=...)"):
        train(url, [1.0], checkpoint=f"{url}/", checkpoint_every="1 epoch")


def test_an_older_local_model_is_replaced_for_a_resume(url: str) -> None:
    settings = {"checkpoint": f"{url}-checkpoints", "checkpoint_every": "1 epoch", "resume": "auto"}
    train(url, [3.0], **settings)
    shutil.copytree("out", "elsewhere")
    train(url, [3.0, 1.0], **settings)
    shutil.rmtree("out")
    Path("elsewhere").rename("out")
    train(url, [3.0, 1.0, 2.0], **settings)
    assert read_status("out/news")["global_step"] == 4
