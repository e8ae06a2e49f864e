"""Checkpoints in a repository of the Hub, by a stand-in: the routes that huggingface_hub's file system asks."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import HfFileSystem

from accmt.addons.remote_checkpoints import RemoteFolder
from tests.toys import Linear, make_points, make_trainer

pytest.importorskip("huggingface_hub", minversion="2", reason="the stand-in answers the requests of version 2")

URL = "hf://user/run"
SHA = "1" * 40


class Hub(ThreadingHTTPServer):
    """A repository with one branch."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if "/resolve/" in path:
            content = self.server.files.get(path.partition("/resolve/main/")[2])
            self.answer(404 if content is None else 200, content or b"")
        elif "/tree/" in path:
            self.answer(200, [self.describe(file) for file in sorted(self.server.files)])
        else:
            self.answer(200, {"id": "user/run", "sha": SHA, "siblings": []})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            return self.answer(200, {"files": files})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del self.server.files[line["value"]["path"]]
        return self.answer(200, {"commitOid": SHA, "commitUrl": f"https://huggingface.co/user/run/commit/{SHA}"})

    def describe(self, file: str) -> dict[str, Any]:
        commit = {"id": SHA, "title": "a file", "date": "2026-01-01T00:00:00.000Z"}
        return {"type": "file", "path": file, "size": len(self.server.files[file]), "oid": SHA, "lastCommit": commit}

    def answer(self, status: int, value: Any) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


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
