import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from accmt.checkpoint import manifest as names
from accmt.checkpoint.manifest import (
    SILENT_FOR_S,
    Unfinished,
    is_abandoned,
    make_unfinished_name,
    parse_unfinished_name,
)

STARTED = int(psutil.Process().create_time())


@pytest.mark.parametrize("kind", ["tmp", "old"])
def test_the_name_of_an_unfinished_folder_says_who_works_on_it(kind, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7.cluster_a/b")
    name = make_unfinished_name(kind, 120)
    assert parse_unfinished_name(name) == Unfinished(kind, 120, "node_7.cluster_a_b", os.getpid(), STARTED)
    assert make_unfinished_name(kind, 120) != name


def unfinished(pid, started, host=None):
    return Unfinished("tmp", 1, host or names._this_host(), pid, started)


def test_a_dead_process_abandons_what_it_wrote_and_a_living_one_does_not(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    living = unfinished(process.pid, int(psutil.Process(process.pid).create_time()))
    assert not is_abandoned(tmp_path, living)
    assert is_abandoned(tmp_path, unfinished(process.pid, living.started - 60)), "its number was another's before"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_abandoned(tmp_path, living), "dead, though nobody has asked how it ended"
    process.communicate()
    assert is_abandoned(tmp_path, living)
    assert is_abandoned(tmp_path, unfinished(os.getpid(), STARTED)), "a process knows its own"


def test_a_process_that_may_not_be_looked_at_is_alive(tmp_path, monkeypatch):
    def deny(pid):
        raise psutil.AccessDenied(pid)

    monkeypatch.setattr(psutil, "Process", deny)
    assert not is_abandoned(tmp_path, unfinished(1, 0))


def test_what_another_machine_writes_is_abandoned_after_a_long_silence(tmp_path):
    (tmp_path / "part").mkdir()
    file = tmp_path / "part" / "weights"
    file.write_text("")
    long_ago = time.time() - SILENT_FOR_S - 60
    of_another = unfinished(1, 0, host="elsewhere")
    assert not is_abandoned(tmp_path, of_another)
    for path in (tmp_path, tmp_path / "part"):
        os.utime(path, (long_ago, long_ago))
    assert not is_abandoned(tmp_path, of_another), "a file in it was written just now"
    os.utime(file, (long_ago, long_ago))
    assert is_abandoned(tmp_path, of_another)


def test_what_another_machine_moved_aside_comes_back_at_once(tmp_path):
    assert is_abandoned(tmp_path, Unfinished("old", 1, "elsewhere", 1, 0))
