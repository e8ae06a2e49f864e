"""Rows of files in a bucket, by a real S3 protocol (moto): read in forked workers, resumed, and seen to change."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from werkzeug.serving import WSGIRequestHandler, make_server

from accmt.errors import DataError
from tests.files_of_rows import read, train, weights_of, write


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        """Log no requests."""


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    from moto.server import DomainDispatcherApplication, create_backend_app

    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, name="asyncio-moto")
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.port}")
        fsspec.filesystem("s3").clear_instance_cache()
        files = fsspec.filesystem("s3", use_listings_cache=False)
        files.mkdir("rows")
        yield files
        fsspec.filesystem("s3").clear_instance_cache()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "file"])
def test_a_run_on_a_bucket_resumes_bit_for_bit(kind: str, bucket: Any):
    bucket.put(str(write(kind, Path.cwd())), f"rows/{kind}", recursive=True)
    data = f"s3://rows/{kind}"
    unbroken = train("unbroken", read(data), dataloader_num_workers=0)
    first = train("parts", read(data), dataloader_num_workers=2, stop=3)
    rest = train("parts", read(data), dataloader_num_workers=2, resume=True)
    assert weights_of(rest) == weights_of(unbroken)
    assert first.seen[:2] + rest.seen == unbroken.seen
    train("changed", read(data), stop=3)
    path = next(iter(sorted(bucket.ls(f"rows/{kind}"))))
    bucket.pipe_file(path, bucket.cat_file(path).replace(b"row 1", b"row X"))
    with pytest.raises(DataError, match=rf"changed: {Path(path).name}"):
        train("changed", read(data, storage_options={"use_listings_cache": False}), resume=True)
