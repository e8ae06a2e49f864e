"""Runs scripts, each in a fork of this process, which has imported what they import.

`forks.py SOCKET` is started by `tests/launching.py`. A fresh process spends three seconds of a core on importing torch,
transformers and accmt before it does anything; in a fork they are there, and its script runs and ends as any other.
`multiprocessing`'s fork server does not: it leaves without what an interpreter does at its end (`atexit`, threads), and
turns Ctrl-C and every exception into exit code 1.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers.optimization  # noqa: F401

import accmt.options.schema  # noqa: F401
import accmt.setup.build  # noqa: F401
import accmt.trainer  # noqa: F401
import tests.many_runs  # noqa: F401

LONGEST = 1 << 17


def wait_for_script(tests: socket.socket) -> bool:
    """Fork for each request; return True in the fork that is to run its script, and False after the last request."""
    while True:
        request, files, *_ = socket.recv_fds(tests, LONGEST, 3)
        forget_ended()
        if not request:
            return False
        if os.fork() == 0:
            return run_beside(*files, **json.loads(request))
        for file in files:
            os.close(file)


def forget_ended() -> None:
    """Let the system forget the forks that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def run_beside(told: int, *output: int, **script: Any) -> bool:
    """Fork once more, to tell the tests which process runs the script, and with which code it ended."""
    process = os.fork()
    if process == 0:
        os.close(told)
        become(output, **script)
        return True
    os.write(told, f"{process}\n".encode())
    _, status = os.waitpid(process, 0)
    os.write(told, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def become(files: Sequence[int], command: list[str], folder: str, environment: dict[str, str]) -> None:
    """Give this fork what the process of a script has for itself: output, folder, environment, arguments and chance."""
    os.setsid()
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    sys.path[0] = str(Path(command[0]).parent)
    torch.seed()
    np.random.seed()  # noqa: NPY002 - the one that users draw from; Python's own is seeded anew by itself


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _tests:
        _has_script = wait_for_script(_tests)
    if _has_script:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except KeyboardInterrupt:  # what a library does at the exit may make Python forget that this ended the script
            traceback.print_exc()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
