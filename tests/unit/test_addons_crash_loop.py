import json

import pytest

from accmt import Callback
from accmt.addons import crash_loop
from accmt.addons.crash_loop import Start, describe_crash_loop, record_failure, record_start
from accmt.errors import Preempted
from tests.toys import Linear, make_points, make_trainer


@pytest.fixture
def as_process(monkeypatch):
    """Let the functions believe that they run in another process."""
    return lambda name: monkeypatch.setattr(crash_loop, "_name_process", lambda: name)


def ended(*ends):
    """Return starts, each given as (step, failed_after)."""
    return [Start(str(i), step, failed, failed and f"ValueError: {i}") for i, (step, failed) in enumerate(ends)]


def describe(tmp_path, step, *ends):
    return describe_crash_loop(ended(*ends), step, tmp_path)


def test_each_start_is_noted_with_its_end(tmp_path, as_process):
    as_process("first")
    assert record_start(tmp_path, 0) == []
    record_failure(tmp_path, 7, "ValueError: x")
    as_process("second")
    assert record_start(tmp_path, 6) == [Start("first", 0, 7, "ValueError: x")]
    as_process("third")
    assert record_start(tmp_path, 6) == [Start("first", 0, 7, "ValueError: x"), Start("second", 6)]


def test_a_run_that_starts_again_in_its_process_has_not_failed(tmp_path, as_process):
    as_process("first")
    record_start(tmp_path, 0)
    assert record_start(tmp_path, 6) == []
    record_failure(tmp_path, 7, "ValueError: x")
    assert record_start(tmp_path, 6) == [Start("first", 6, 7, "ValueError: x")]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"starts": [{"x": 1}]}', '{"starts": 3}'])
def test_a_damaged_file_is_begun_anew(tmp_path, text):
    (tmp_path / "starts.json").write_text(text)
    assert record_start(tmp_path, 0) == []


@pytest.mark.parametrize(
    ("step", "ends"),
    [
        (6, [(0, 7), (6, 7), (6, 7)]),
        (7, [(0, 7), (7, 7), (7, 7)]),
        (6, [(0, 3), (0, 7), (6, 7), (6, 7)]),
        (6, [(0, 7), (6, None), (6, 7)]),
    ],
)
def test_three_failures_at_one_update_are_told(tmp_path, step, ends):
    where, got, expected, do = describe(tmp_path, step, *ends).splitlines()
    assert where == f"the run that resumes at step {step} ({tmp_path})"
    ended = f"all ended after step 7, most recently with ValueError: {len(ends) - 1}"
    assert got == f"  got: a crash loop: the last 3 starts {ended}"
    assert expected == "  expected: a start that makes progress"
    for name in ("on_bad_sample", "on_nonfinite", "max_micro_batch_size: auto"):
        assert name in do


@pytest.mark.parametrize(
    ("step", "ends"), [(6, [(0, None), (6, None), (6, None)]), (0, [(0, None), (0, None), (0, None)])]
)
def test_three_kills_before_the_same_checkpoint_are_told(tmp_path, step, ends):
    text = describe(tmp_path, step, *ends)
    assert f"the last 3 starts all ended somewhere after step {step}, before the next checkpoint" in text
    assert "killed without an error message" in text
    assert "checkpoint_every" in text


@pytest.mark.parametrize(
    ("step", "ends"),
    [
        (0, []),
        (6, [(6, 7), (6, 7)]),
        (6, [(6, 7), (6, 7), (6, 8)]),
        (6, [(6, 7), (6, 8), (6, 7)]),
        (9, [(6, None), (6, None), (6, None)]),
        (9, [(0, None), (3, None), (6, None)]),
        (9, [(6, 9), (6, None), (6, 10)]),
    ],
)
def test_fewer_failures_or_others_are_not(tmp_path, step, ends):
    assert describe(tmp_path, step, *ends) is None


@pytest.mark.parametrize(
    ("error", "is_failure"),
    [(ValueError("x"), True), (MemoryError(), True), (KeyboardInterrupt(), False), (Preempted(143), False)],
    ids=repr,
)
def test_a_run_that_somebody_ends_has_not_failed(error, is_failure):
    class End(Callback):
        def on_before_backward(self):
            raise error

    record = make_trainer().settings.checkpoint_folder / "starts.json"
    for resume in ("auto", False):
        with pytest.raises(type(error)):
            make_trainer(checkpoint_every="epoch", resume=resume, callbacks=End()).fit(Linear(), make_points())
        assert record.exists() == is_failure
        assert not is_failure or len(json.loads(record.read_text())["starts"]) == 1
    make_trainer(checkpoint_every="epoch", resume="auto").fit(Linear(), make_points())
    assert not record.exists()
