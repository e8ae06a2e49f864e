"""Checkpoints in a repository of the Hub, by a stand-in."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import HfFileSystem

from accmt.addons.remote_checkpoints import RemoteFolder
from tests.hub import Hub
from tests.toys import Linear, make_points, make_trainer

pytest.importorskip("huggingface_hub", minversion="2", reason="the stand-in answers the requests of version 2")

URL = "hf://user/run"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server, pytest.MonkeyPatch.context() as monkeypatch:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url, path = f"http://127.0.0.1:{server.server_port}", "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + path)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_planted")
        HfFileSystem.clear_instance_cache()
        yield server
        HfFileSystem.clear_instance_cache()
        server.shutdown()
        thread.join()


def train(epochs: int, folder: str = "out/model", **settings: Any) -> Linear:
    module = Linear()
    settings = {"checkpoint_every": "1 epoch", "resume": "auto", **settings}
    make_trainer({"epochs": epochs, "batch_size": 4}, folder, **settings).fit(module, make_points())
    return module


def test_a_run_whose_disk_is_wiped_continues_from_the_hub(hub: Hub) -> None:
    whole = train(4, "out/whole")
    train(2, checkpoint=URL)
    shutil.rmtree("out/checkpoint-model")
    resumed = train(4, checkpoint=URL)
    assert torch.equal(resumed.model.weight, whole.model.weight)
    assert [one.manifest.step for one in RemoteFolder(URL).newest_first() if one.manifest] == [8]
    assert all(file.startswith("step-00000008-") for file in hub.files)  # neither a lease nor an old checkpoint
    other = train(5, "out/other", resume=f"{URL}@main")
    assert torch.equal(other.model.weight, train(5, "out/whole").model.weight)
    assert not any(b"hf_planted" in content for content in hub.files.values())
