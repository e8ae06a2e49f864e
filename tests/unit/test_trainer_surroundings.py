"""What is around a program and may go while it trains: its folder, its streams, the pipe that reads its output."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accmt import Callback
from tests.launching import ROOT
from tests.toys import Linear, make_points, make_trainer


class Losing(Callback):
    """Deletes the current folder within the run."""

    def on_update_end(self):
        shutil.rmtree(Path.cwd(), ignore_errors=True) if self.state.global_step == 1 else None


def test_a_run_with_absolute_paths_goes_on_without_its_current_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    settings = {"logging_dir": tmp_path / "logs", "checkpoint_every": "1 step", "model_saving": "best_valid_loss"}
    trainer = make_trainer(model_path=tmp_path / "model", callbacks=Losing(), **settings)
    trainer.fit(Linear(), make_points(), make_points(4))
    trainer.validate()
    assert trainer.state.finished
    assert (tmp_path / "model" / "status.json").exists()
    monkeypatch.chdir(tmp_path)


class Broken(io.StringIO):
    """A stream whose other end is gone."""

    def write(self, text):
        raise BrokenPipeError

    def flush(self):
        raise BrokenPipeError

    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [None, Broken(), "closed"], ids=["none", "broken", "closed"])
def test_a_run_needs_no_streams(stream, monkeypatch):
    if stream == "closed":
        stream = io.StringIO()
        stream.close()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    trainer = make_trainer(verbose=True, enable_progress_bar=True)
    trainer.fit(Linear(), make_points(), make_points(4))
    trainer.validate()
    assert trainer.state.finished


def test_a_run_outlives_the_pipe_that_reads_its_output(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from tests.toys import Linear, make_points, make_trainer\n"
        "trainer = make_trainer(verbose=True, enable_progress_bar=True)\n"
        "trainer.fit(Linear(), make_points(), make_points(4))\n"
        "open('done', 'w').close()\n"
    )
    reading = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reading.wait()
    command = [sys.executable, str(script)]
    env = {"PYTHONPATH": str(ROOT), "PATH": ""}
    subprocess.run(command, cwd=tmp_path, stdout=reading.stdin, stderr=reading.stdin, env=env, check=False, timeout=120)
    reading.stdin.close()
    assert (tmp_path / "done").exists()
