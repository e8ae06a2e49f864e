"""A PostgreSQL server for tests: the one of Debian's packages, with its data in a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_WITHIN_S = 60.0


def find_server() -> Path | None:
    """Return the folder of the server's programs; None where it is not installed (`apt-get install postgresql`)."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return found[-1].parent if found else None


@contextmanager
def running_server() -> Iterator[str]:
    """Run a server, and yield the URL of an empty database in it."""
    programs = find_server()
    assert programs is not None
    folder = Path(tempfile.mkdtemp(prefix="accmt-postgresql-"))
    as_user: list[str] = []
    if os.geteuid() == 0:  # as which the server does not run
        user = pwd.getpwnam("postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
        as_user = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data = folder / "data"
    make = [*as_user, programs / "initdb", "-D", data, "-U", "tester", "--auth=trust", "--no-sync"]
    subprocess.run(make, check=True, capture_output=True, cwd=folder)
    options = ["-c", f"port={port}", "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-k", folder]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [*as_user, programs / "postgres", "-D", data, *options], stdout=log, stderr=log, cwd=folder
        )
    try:
        deadline = time.monotonic() + _WITHIN_S
        ready = [programs / "pg_isready", "-h", "127.0.0.1", "-p", str(port), "-q"]
        while subprocess.run(ready, check=False).returncode != 0:
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)
        yield f"postgresql://tester@127.0.0.1:{port}/postgres"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
        shutil.rmtree(folder)
