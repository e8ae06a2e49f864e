"""What is on the page, and that it needs nothing else."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from accmt.addons.goodput.records import Totals
from accmt.addons.report.page import build_page, draw_charts, thin_out
from accmt.addons.report.records import Curve, Event, RunRecord, name_apart
from accmt.cli.main import main


def make_run(name="steady", config=None, **curves):
    curves = curves or {"train_loss": [3.0, 2.0, 1.0]}
    made = {
        label: Curve(list(range(1, len(values) + 1)), [float(i) for i in range(len(values))], list(values))
        for label, values in curves.items()
    }
    events = [Event("started", 0, 0.0), Event("checkpoint", 2, 1.0), Event("failed", 3, 2.0)]
    return RunRecord(name, Path("logs") / name, config or {"optim.lr": 0.1}, made, [(3, {"val_loss": 0.25})], events)


def figures_of(page):
    return json.loads(re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S)[1])


def test_every_logged_value_has_a_curve():
    page = build_page([make_run(train_loss=[3, 2], val_loss=[2, 1], acc=[0.5, 0.75], CPU=[10, 20])])
    drawn = {trace["name"]: trace["y"] for figure in figures_of(page) for trace in figure["data"] if "y" in trace}
    expected = {"train_loss": [3, 2], "val_loss": [2, 1], "acc": [0.5, 0.75], "CPU": [10, 20]}
    assert {name: drawn[name] for name in expected} == expected


def test_points_of_a_run_with_a_ledger_know_the_command_that_replays_their_step(tmp_path):
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "ledger.jsonl").touch()
    with_ledger = replace(make_run("a"), folder=tmp_path / "a run")
    [losses, *_] = draw_charts([with_ledger, make_run("b")])
    commands = [trace.meta.get("replay") for trace in losses.figure.data]
    assert commands == [f"accmt replay '{tmp_path}/a run' --step ", None]


def test_the_first_best_of_each_result_is_named_and_marked():
    run = make_run()
    results = [(1, 0.5, 0.5), (2, 0.25, 0.75), (3, 0.25, 0.75)]
    run.evaluations[:] = [(s, {"val_loss": loss, "accuracy": a, "other": 1.0}) for s, loss, a in results]
    page = build_page([run])
    assert "val_loss 0.25 at step 2, accuracy 0.75 at step 2" in page
    assert page.count("<b>0.25</b>") == page.count("<b>0.75</b>") == 1
    assert "<b>1</b>" not in page


def named(*runs):
    made = [make_run(name, config) for name, config in runs]
    made = [replace(run, folder=Path("logs/news") / run.name) for run in made]
    return [run.name for run in name_apart(made)]


def test_runs_have_names_that_people_tell_apart():
    first, second = "2026-11-22_21-20-37-fffo", "2026-11-22_21-35-26-mguw"
    assert named((first, {"lr": 1})) == ["news 11-22 21:20:37"]
    assert named(("mine", {"lr": 1}), ("other", {"lr": 1})) == ["mine", "other"]
    lrs = named((first, {"lr": 1, "seed": 3}), (second, {"lr": 2, "seed": 4}))
    assert lrs == ["news 11-22 21:20:37, lr 1", "news 11-22 21:35:26, lr 2"]
    alike = "2026-11-22_21-20-37-abcd"
    assert named((first, {"lr": 1}), (alike, {"lr": 1})) == [first, alike]


def test_the_tables_hold_evaluations_status_and_configuration():
    page = build_page([make_run(config={"optim.lr": 0.1, "epochs": 3})])
    assert "<td>3</td><td><b>0.25</b></td>" in page
    assert '<b class="failed">failed</b>' in page
    assert "1 × checkpoint, 1 × failed" in page
    assert "<td>optim.lr</td><td>0.1</td>" in page
    assert "<td>epochs</td><td>3</td>" in page


def test_configurations_are_compared():
    runs = [make_run("a", {"optim.lr": 0.1, "epochs": 3}), make_run("b", {"optim.lr": 0.2, "epochs": 3, "seed": 1})]
    differences, same = re.search(
        r'<div id="differences">(.*?)</div><details>(.*?)</details>', build_page(runs), re.S
    ).groups()
    assert "<td>optim.lr</td><td>0.1</td><td>0.2</td>" in differences
    assert "<td>seed</td><td>-</td><td>1</td>" in differences
    assert "epochs" not in differences
    assert "<td>epochs</td><td>3</td><td>3</td>" in same


class Links(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_the_page_refers_to_nothing_outside():
    page = build_page([make_run()])
    links = Links()
    links.feed(page)
    assert links.found == []
    assert "default-src 'none'" in page  # browsers refuse it, too


def test_names_from_a_run_cannot_become_code():
    evil = '</script><script>alert("x")</script><img src=x onerror=alert(1)>'
    page = build_page([make_run(evil, {evil: evil}, **{f"{evil}_loss": [1.0], evil: [2.0]})])
    assert "<img src=x" not in page
    assert '<script>alert("x")' not in page
    assert any(evil in trace["name"] for figure in figures_of(page) for trace in figure["data"])


def test_values_that_are_not_finite_are_gaps():
    [losses, *_] = figures_of(build_page([make_run(train_loss=[1.0, math.nan, math.inf, 2.0])]))
    assert losses["data"][0]["y"] == [1.0, None, None, 2.0]


def test_long_curves_are_thinned_and_keep_their_peaks():
    values = [1.0] * 100_000
    values[12_345], values[54_321], values[77_777] = 50.0, -50.0, math.nan
    thin = thin_out(Curve(list(range(100_000)), [0.0] * 100_000, values), most=1_000)
    assert len(thin.values) < 1_100
    assert {50.0, -50.0} <= set(thin.values)
    assert 77_777 in thin.steps
    assert (thin.steps[0], thin.steps[-1]) == (0, 99_999)
    assert thin.steps == sorted(thin.steps)


def test_the_command_writes_the_page_into_the_run_folder(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "history.jsonl").write_text('{"step": 1, "time": 1.0, "values": {"train_loss": 1.0}}\n')
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert "Plotly.newPlot" in (folder / "report.html").read_text()
    assert main(["report", str(folder), str(folder), "-o", str(tmp_path / "both.html")]) == 0
    assert (tmp_path / "both.html").exists()


def test_the_time_split_is_in_percent():
    charts = draw_charts([make_run(train_loss=[1.0, 1.0], seconds_data=[1.0, 0.0], seconds_compute=[1.0, 2.0])])
    split = charts[-2].figure
    assert {trace.name: trace.x[0] for trace in split.data} == {"data": 25.0, "compute": 75.0}
    assert not any("seconds_" in chart.figure.layout.title.text for chart in charts)


def test_the_parts_of_the_goodput_table_add_up_to_all():
    totals = Totals()
    totals.add({"time": 8.0, "step": 4, "seconds": {"training": 6.0, "a bin of another version": 2.0}})
    page = build_page([replace(make_run(), goodput=totals)])
    rows = re.findall(r"<tr><td>([^<]*)</td><td>([\d.]+) s", page)
    assert rows == [("training", "6.0"), ("a bin of another version", "2.0"), ("all", "8.0")]
