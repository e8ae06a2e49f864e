"""The story at the beginning of docs/find-out-what-happened.md, run as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from accmt.cli.main import main
from tests.e2e.markdown import ROOT, read_blocks, write_files
from tests.launching import python

PAGE = ROOT / "docs" / "find-out-what-happened.md"
PLANTED = re.compile(r"    targets\[317\] .*\n")


def mask(printed: str) -> str:
    """Return a text without its numbers, whose last digits depend on the machine, and without its columns."""
    number, digest = r"-?\b(?:0x)?\d[\w.]*(?:[pe][+-]?\d+)?", r"\b[0-9a-f]{16}\b"
    return re.sub(r" +", " ", re.sub(f"{digest}|{number}", "#", printed)).strip()


@pytest.mark.slow
@pytest.mark.repeats
def test_the_spike_is_solved_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(PAGE, tmp_path)
    script = tmp_path / "spike.py"
    ended = python(script, env={"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0, ended.stderr
    program = script.read_text()
    of_sample, of_curve, of_fix = (block.text for block in read_blocks(PAGE, "text")[:3])
    for shown in (of_sample, of_curve, of_fix):
        command, _, expected = shown.partition("\n")
        if shown is of_fix:
            assert PLANTED.search(program)
            script.write_text(PLANTED.sub("", program).replace('RUN = "night"', 'RUN = "fixed"'))
            assert python(script, env={"PYTHONPATH": str(ROOT)}).returncode == 0
        assert main(command.removeprefix("$ accmt ").split()) == (shown is of_fix)
        printed = capsys.readouterr().out
        assert mask(printed) == mask(expected)
        assert shown is not of_sample or re.search(r"of 8 samples\n +317 +3\d\d\d ", printed)
        assert shown is not of_fix or "diverge at step 36: the content of the batches" in printed
