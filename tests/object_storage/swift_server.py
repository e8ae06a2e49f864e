"""A real object store in a folder: OpenStack Swift with its S3 protocol, one copy of everything on one disk."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ACCESS_KEY = "test:tester"
SECRET_KEY = "planted-secret-value"  # noqa: S105 - of a server that exists for a test

_SERVER = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
log_address = {folder}/no-syslog
disable_fallocate = true

"""

_STORE = """
[pipeline:main]
pipeline = {kind}-server

[app:{kind}-server]
use = egg:swift#{kind}
"""

_PROXY = f"""
[pipeline:main]
pipeline = catch_errors s3api tempauth bulk slo proxy-server

[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true

[filter:catch_errors]
use = egg:swift#catch_errors

[filter:s3api]
use = egg:swift#s3api
location = us-east-1

[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = {SECRET_KEY} .admin

[filter:bulk]
use = egg:swift#bulk

[filter:slo]
use = egg:swift#slo
"""


@contextmanager
def running_swift(folder: Path) -> Iterator[str]:
    """Start the four servers of Swift in a folder, and return the URL of their S3 endpoint."""
    import getpass

    programs = Path(sys.executable).parent
    (folder / "devices" / "disk").mkdir(parents=True)
    (folder / "swift.conf").write_text(
        "[swift-hash]\nswift_hash_path_suffix = tests\n\n[storage-policy:0]\nname = one\ndefault = yes\n"
    )
    ports = {kind: _find_port() for kind in ("account", "container", "object", "proxy")}
    for kind, port in ports.items():
        rest = _PROXY if kind == "proxy" else _STORE.format(kind=kind)
        (folder / f"{kind}.conf").write_text(_SERVER.format(port=port, folder=folder, user=getpass.getuser()) + rest)
        if kind != "proxy":
            build = [programs / "swift-ring-builder", folder / f"{kind}.builder"]
            device = ["add", "--region", "1", "--zone", "1", "--ip", "127.0.0.1", "--port", str(port)]
            subprocess.run([*build, "create", "4", "1", "0"], check=True, stdout=subprocess.DEVNULL)
            subprocess.run(
                [*build, *device, "--device", "disk", "--weight", "1"], check=True, stdout=subprocess.DEVNULL
            )
            subprocess.run([*build, "rebalance"], check=True, stdout=subprocess.DEVNULL)
    with (folder / "log").open("w") as log:
        servers = [
            subprocess.Popen(
                [sys.executable, programs / f"swift-{kind}-server", folder / f"{kind}.conf"],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for kind in ports
        ]
        try:
            for server, port in zip(servers, ports.values(), strict=True):
                _wait_for(server, port, folder / "log")
            yield f"http://127.0.0.1:{ports['proxy']}"
        finally:
            for server in servers:
                server.terminate()
            for server in servers:
                server.wait(30)


def _find_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _wait_for(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if server.poll() is not None:
            raise RuntimeError(f"a server of Swift has ended:\n{log.read_text()}")
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"a server of Swift does not answer on port {port}:\n{log.read_text()}")
