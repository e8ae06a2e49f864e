import logging
import subprocess
import sys

import pytest

from accmt import messages
from accmt.messages import say, say_once, speaking, warn


@pytest.fixture
def alone(monkeypatch):
    """A logger as in a program that has not set logging up: pytest's own handlers are out of reach."""
    monkeypatch.setattr(messages, "logger", logging.Logger("accmt"))


def test_messages_and_warnings_reach_the_terminal_during_a_run_only(alone, capsys):
    with speaking(verbose=True):
        say("begun")
        warn("slow")
    say("after")
    assert capsys.readouterr().err == "[accmt] begun\n[accmt] slow\n"
    assert capsys.readouterr().out == ""


def test_a_message_said_once_is_said_again_in_the_next_run(alone, capsys):
    for _ in range(2):
        with speaking(verbose=True):
            say_once("a note")
            say_once("a note")
            say_once("another")
    assert capsys.readouterr().err == "[accmt] a note\n[accmt] another\n" * 2


def test_after_a_run_or_an_error_the_logger_is_as_before(alone):
    before = messages.logger.level, list(messages.logger.handlers)
    with pytest.raises(ZeroDivisionError), speaking(verbose=True):
        raise ZeroDivisionError
    assert (messages.logger.level, messages.logger.handlers) == before


def test_a_program_with_logging_of_its_own_gets_the_records_and_the_terminal_nothing(caplog, capsys):
    with speaking(verbose=True):
        say("begun")
        warn("slow")
    assert [(r.name, r.levelname, r.message) for r in caplog.records] == [
        ("accmt", "INFO", "begun"),
        ("accmt", "WARNING", "slow"),
    ]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("speak", [say, warn, say_once])
def test_only_the_main_process_speaks(speak, alone, capsys, monkeypatch):
    monkeypatch.setattr(messages, "is_main_process", lambda: False)
    with speaking(verbose=True):
        speak("begun")
    assert capsys.readouterr().err == ""


def test_a_library_that_configures_logging_during_a_run_does_not_repeat_messages(alone, capsys, monkeypatch):
    monkeypatch.setattr(messages.logger, "parent", logging.Logger("root"))
    with speaking(verbose=True):
        messages.logger.parent.addHandler(logging.StreamHandler(sys.stderr))
        say("begun")
    assert capsys.readouterr().err == "[accmt] begun\n"
    assert messages.logger.propagate


def test_a_terminal_that_is_gone_stops_nothing():
    script = (
        "import os, sys\n"
        "from accmt.messages import say, speaking\n"
        "reader, writer = os.pipe()\n"
        "os.close(reader)\n"
        "os.dup2(writer, 2)\n"
        "with speaking(verbose=True):\n"
        "    say('nobody hears this')\n"
        "sys.stdout.write('went on')\n"
        "sys.stdout.flush()\n"
        "os._exit(0)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout, run.returncode) == ("went on", 0)
