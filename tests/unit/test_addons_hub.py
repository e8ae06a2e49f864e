"""Uploading to a stand-in of the hub: the routes that huggingface_hub asks, on this machine."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest

from accmt import ArgumentError, PushToHub
from tests.raising import raises_at
from tests.toys import Linear, make_points, make_trainer


class Hub(ThreadingHTTPServer):
    """Keeps what is committed.

    Attributes:
        files: The contents of each file by its path.
        broken: Routes, by a part of their path, that answer with an error.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.files: dict[str, bytes] = {}
        self.broken: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self.server.asked.append(self.path)
        status = next((status for part, status in self.server.broken.items() if part in self.path), 200)
        self.answer(status, {"error": "refused"} if status != 200 else self.do(body))

    def do_GET(self):
        self.answer(404, {"error": "there is no such repository"})

    def do(self, body):
        if self.path == "/api/repos/create":
            return {"url": f"https://huggingface.co/user/{json.loads(body)['name']}"}
        if self.path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if "/preupload/" in self.path:
            sent = json.loads(body)["files"]
            return {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in sent]}
        lines = [json.loads(line) for line in body.splitlines()]
        for value in (line["value"] for line in lines if line["key"] == "file"):
            self.server.files[value["path"]] = base64.b64decode(value["content"])
        return {
            "success": True,
            "commitOid": "1" * 40,
            "commitUrl": f"https://huggingface.co/user/points/commit/{'1' * 40}",
        }

    def answer(self, status, value):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def train(hub, **arguments):
    callback = PushToHub("user/points", token="hf_token", endpoint=hub.url)
    trainer = make_trainer(verbose=True, **{"model_saving": "best_valid_loss", "callbacks": callback, **arguments})
    trainer.fit(Linear(), make_points(), make_points())
    return trainer


def test_the_model_folder_is_uploaded_at_the_end(hub, caplog):
    trainer = train(hub)
    folder = trainer.settings.model_folder
    assert hub.files == {path.name: path.read_bytes() for path in folder.glob("[!.]*")}
    assert {"model.safetensors", "README.md", "hps.yaml"} <= set(hub.files)
    assert hub.asked[0] == "/api/repos/create"
    assert f"uploaded {folder} to {hub.url}/user/points" in caplog.text


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_without_rights_is_an_error_before_the_first_step(hub, status):
    hub.broken["create"] = status
    with raises_at(ArgumentError, "PushToHub('user/points')"):
        train(hub)
    assert hub.files == {}


@pytest.mark.parametrize("route", ["create", "commit"])
def test_a_hub_that_is_down_harms_no_run(hub, route, caplog, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.broken[route] = 500
    trainer = train(hub)
    assert trainer.state.finished
    assert "the Hub could not be reached for user/points" in caplog.text
    assert (f"hf upload user/points {trainer.settings.model_folder}" in caplog.text) is (route == "commit")
    assert bool(hub.files) is (route == "create")
