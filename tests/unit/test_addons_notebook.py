"""The live curve in a notebook: real notebooks run by a real kernel, and the drawing by itself."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import nbformat
import pytest

from accmt.addons.notebook import MOST_POINTS, Curve, NotebookView, draw
from accmt.callbacks.progress import is_notebook
from accmt.setup.build import make_builtin_callbacks
from accmt.state import TrainingState
from tests.toys import logged, make_points, make_trainer

RUN = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=120, allow_errors=True).execute()
nbformat.write(notebook, sys.argv[1])
"""

IMPORTS = """
import os, signal, sys
sys.path.insert(0, {root!r})
from accmt import Callback, read_history
from tests.toys import Linear, Recorder, logged, make_points, make_trainer
"""


def run_notebook(*cells):
    """Run the cells in a kernel of its own, and return what each put out."""
    root, path = Path(__file__).parents[2], Path("notebook.ipynb")
    cells = [IMPORTS.format(root=str(root)), *cells]
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), path)
    here = str(Path.cwd())
    own = {"HOME": here, "IPYTHONDIR": f"{here}/ipython", "JUPYTER_RUNTIME_DIR": here, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, str(path)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [cell.outputs for cell in nbformat.read(path, 4).cells[1:]]


def texts(outputs):
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def pictures(outputs):
    return [output.data["text/html"] for output in outputs if output.output_type == "display_data"]


def points_of(html, name):
    """Return the (update, value) pairs that the mouse finds on a curve."""
    found = re.findall(rf"<title>{name} (\S+) at step (\d+)</title>", html)
    return [(int(step), float(value)) for value, step in found]


@pytest.mark.slow
def test_a_notebook_shows_one_output_with_bar_and_curves_and_survives_ctrl_c():
    fit, interrupt, afterwards, silent = run_notebook(
        """
        trainer = make_trainer({"epochs": 2}, verbose=True, evaluate_every_n_steps=3)
        trainer.fit(Linear(), make_points(12), make_points(4))
        print(logged(trainer, "train_loss"), logged(trainer, "val_loss"), sep="|")
        """,
        """
        class CtrlC(Callback):
            def on_update_end(self):
                if self.state.global_step == 4:
                    os.kill(os.getpid(), signal.SIGINT)

        recorder = Recorder()
        interrupted = make_trainer({"epochs": 9}, verbose=True, checkpoint_every="epoch", callbacks=[CtrlC(), recorder])
        interrupted.fit(Linear(), make_points(12))
        """,
        """
        print(interrupted.interrupted, recorder.names("on_keyboard_interrupt", "on_fit_end"))
        print([row["status"] for row in read_history(interrupted.log_dir) if "status" in row])
        resumed = make_trainer({"epochs": 1}, resume=True, verbose=True, checkpoint_every="epoch")
        resumed.fit(Linear(), make_points(12))
        print(resumed.global_step, "ipywidgets" in sys.modules)
        """,
        """
        make_trainer().fit(Linear(), make_points(4))
        """,
    )
    (html,) = pictures(fit)
    train, val = (eval(part) for part in texts(fit).splitlines()[-1].split("|"))  # noqa: S307 - what the cell printed
    assert [step for step, _ in train] == list(range(1, 13))
    assert len(val) >= 4
    assert points_of(html, "train_loss") == [(step, pytest.approx(value, rel=1e-3)) for step, value in train]
    assert points_of(html, "val_loss") == [(step, pytest.approx(value, rel=1e-3)) for step, value in val]
    assert "12/12" in re.search("<pre.*?</pre>", html)[0]

    (error,) = [output for output in interrupt if output.output_type == "error"]
    assert error.ename == "KeyboardInterrupt"
    (html,) = pictures(interrupt)
    assert [step for step, _ in points_of(html, "train_loss")] == [1, 2, 3, 4]
    assert texts(afterwards).splitlines()[:2] == ["True ['on_keyboard_interrupt', 'on_fit_end']", "['KILLED']"]
    assert texts(afterwards).splitlines()[-1] == "6 False"
    (html,) = pictures(afterwards)
    assert [step for step, _ in points_of(html, "train_loss")] == [5, 6]
    assert pictures(silent) == []


def test_elsewhere_there_is_no_view_and_nothing_is_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not is_notebook()
    assert "IPython" not in sys.modules
    callbacks = make_builtin_callbacks(make_trainer(verbose=True).settings, None, None)
    assert not any(isinstance(callback, NotebookView) for callback in callbacks)


class Output:
    """Stands in for a display of IPython."""

    def __init__(self):
        self.pictures = []

    def display(self, picture, *, raw, display_id):
        assert raw
        assert display_id
        self.pictures.append(picture)
        return self

    def update(self, picture, *, raw):
        assert raw
        self.pictures.append(picture)


@pytest.fixture
def output(monkeypatch):
    output = Output()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", output)
    return output


def make_view():
    view = NotebookView()
    view.state = TrainingState()
    return view


def test_it_draws_at_most_once_a_second_and_the_last_state_at_the_end(output):
    view = make_view()
    view.on_fit_start()
    for step in range(1, 501):
        view.on_log(values={"train_loss": 1 / step}, step=step)
        view.terminal.write(f"\r {step}/500")
    assert len(output.pictures) == 2
    view.on_fit_end()
    assert len(output.pictures) == 3
    assert "500/500" in output.pictures[-1]["text/html"]
    assert output.pictures[-1]["text/plain"] == "500/500\ntrain_loss 0.002"
    view.on_log(values={"train_loss": 1.0}, step=501)
    assert len(output.pictures) == 3


def test_several_validation_sets_have_a_curve_each(output):
    view = make_view()
    view.on_fit_start()
    view.state.global_step = 5
    view.on_evaluation_end(metrics={"val_loss__a": 1.0, "val_loss__b": 2.0, "accuracy": 0.5})
    view.on_fit_end()
    html = output.pictures[-1]["text/html"]
    assert points_of(html, "val_loss__a") == [(5, 1.0)]
    assert points_of(html, "val_loss__b") == [(5, 2.0)]
    assert "accuracy" not in html


def test_a_frontend_that_is_gone_does_not_end_the_run(output, monkeypatch):
    tried = []

    def fail(picture, *, raw):
        tried.append(picture)
        raise RuntimeError("gone")

    view = make_view()
    view.on_fit_start()
    monkeypatch.setattr(output, "update", fail)
    view.on_log(values={"train_loss": 1.0}, step=1)
    view.on_fit_end()
    assert tried, "the frontend was asked, and its error held back"


def test_a_fit_in_a_notebook_draws_the_bar_into_its_output(output, monkeypatch, capsys):
    class ZMQInteractiveShell:
        pass

    sys.modules["IPython"].get_ipython = ZMQInteractiveShell
    from tests.toys import Linear

    trainer = make_trainer(verbose=True, enable_progress_bar=None)
    trainer.fit(Linear(), make_points(8))
    html = output.pictures[-1]["text/html"]
    assert "4/4" in html
    assert points_of(html, "train_loss") == [(s, pytest.approx(v, rel=1e-3)) for s, v in logged(trainer, "train_loss")]
    assert "4/4" not in capsys.readouterr().err
    count = len(output.pictures)
    make_trainer(verbose=True, enable_progress_bar=False).fit(Linear(), make_points(8))
    assert len(output.pictures) == count


def test_a_long_run_is_thinned_out_and_keeps_its_shape():
    curve = Curve()
    for step in range(100_000):
        curve.add(step, math.sin(step / 5000))
    points = curve.points
    assert MOST_POINTS <= len(points) < 2 * MOST_POINTS
    assert all(value == pytest.approx(math.sin(step / 5000), abs=0.05) for step, value in points)
    assert points[0][0] < 500
    assert points[-1][0] > 99_000
    assert curve.newest == math.sin(99_999 / 5000)


def test_values_that_are_not_finite_leave_a_gap_and_are_named():
    curve = Curve()
    for step, value in enumerate([1.0, math.nan, math.inf, 2.0, math.nan]):
        curve.add(step, value)
    assert curve.points == [(0, 1.0), (3, 2.0)]
    assert "train_loss nan" in draw({"train_loss": curve})
    nothing = Curve()
    nothing.add(0, math.nan)
    assert draw({"train_loss": nothing}) == draw({}) == ""


def test_the_drawing_is_well_formed_and_inside_its_frame():
    curves = {}
    for name, values in {"train_loss": [3.0, 1.0, 2.0], "<b>&": [5.0], "flat": [1.0, 1.0]}.items():
        curves[name] = Curve()
        for step, value in enumerate(values):
            curves[name].add(step, value)
    tree = ElementTree.fromstring(draw(curves))
    lines = [element.get("points") for element in tree.iter("{http://www.w3.org/2000/svg}polyline")]
    places = [[tuple(map(float, place.split(","))) for place in line.split()] for line in lines]
    assert [len(line) for line in places] == [3, 1, 2]
    assert all(0 <= x <= 640 and 0 <= y <= 240 for line in places for x, y in line)
    (_, top), (_, bottom), (_, middle) = places[0]
    assert top < middle < bottom
    texts = [element.text for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:4] == ["5", "1", "step 0", "2"]
    assert "<b>& 5" in texts
