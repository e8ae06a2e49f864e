"""A stand-in of the Hugging Face Hub: the routes that huggingface_hub's file system and commits ask."""

from __future__ import annotations

import base64
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

SHA = "1" * 40


class Hub(ThreadingHTTPServer):
    """A repository `user/run` with one branch.

    Args:
        latency_s: How long each answer takes.

    Attributes:
        files: The contents of each file by its path.
    """

    def __init__(self, latency_s: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.latency_s = latency_s
        self.files: dict[str, bytes] = {}


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if "/resolve/" in path:
            content = self.server.files.get(path.partition("/resolve/main/")[2])
            self.answer(404 if content is None else 200, content or b"{}")
        elif "/tree/" in path:
            folder = path.partition("/tree/main")[2].lstrip("/")
            inside = [file for file in sorted(self.server.files) if file.startswith(folder)]
            if folder and not inside:
                return self.answer(404, {"error": "no such folder"})
            self.answer(200, [self.describe(file) for file in inside])
        else:
            self.answer(200, {"id": "user/run", "sha": SHA, "siblings": []})
        return None

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.path == "/api/repos/create":
            return self.answer(200, {"url": "https://huggingface.co/user/run"})
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
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
        time.sleep(self.server.latency_s)
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
