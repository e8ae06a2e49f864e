"""The report in a real browser: it draws, its controls work, nothing is complained about and nothing is fetched.

Needs Chromium (Debian, Ubuntu: `apt-get install chromium`), and is skipped where there is none.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from accmt.addons.report import read_run, write_report
from tests.toys import Linear, make_points, make_trainer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=20000",
    "--enable-logging=stderr",
)

PROBE = """
<pre id="found"></pre>
<script>
  const found = { errors: [] };
  window.addEventListener("error", event => found.errors.push(event.message));
  const turn = (id, value) => {
    const control = document.querySelector(id);
    if (control.type === "checkbox") control.checked = value; else control.value = value;
    control.dispatchEvent(new Event("change"));
  };
  const losses = () => document.querySelector("#Losses .js-plotly-plot");
  window.addEventListener("load", async () => {
    const rest = () => new Promise(resolve => setTimeout(resolve, 500));
    while (!document.body.dataset.isDrawn) await rest();
    found.charts = document.querySelectorAll(".js-plotly-plot").length;
    found.drawn = [...document.querySelectorAll(".chart")].every(box => box.querySelector("svg.main-svg"));
    found.tables = document.querySelectorAll("#Time .box > table").length;
    const values = document.querySelector("#Values .grid");
    found.full = values.firstElementChild.offsetWidth === values.offsetWidth;
    const runs = document.querySelector("table");
    found.overflows = runs.scrollWidth > runs.clientWidth;
    found.lines = losses().querySelectorAll(".scatterlayer .trace").length;
    losses().emit("plotly_click", { points: [{ data: losses().data[0], pointNumber: 1 }] });
    found.replay = document.getElementById("replay").textContent.replace(/ .*one/, " one");
    found.before = losses()._fullLayout.yaxis.type;
    turn("#log", true); await rest();
    found.log = losses()._fullLayout.yaxis.type;
    turn("#x", "seconds"); await rest();
    found.seconds = losses().data[0].x[0] === losses().data[0].meta.seconds[0];
    turn("input.run", false); await rest();
    found.left = losses().querySelectorAll(".scatterlayer .trace").length;
    await Plotly.relayout(losses(), { "xaxis.range": [0, 1] }); await rest();
    found.zoomed = losses()._fullLayout.xaxis.range;
    found.fetched = performance.getEntriesByType("resource").map(entry => entry.name);
    document.getElementById("found").textContent = JSON.stringify(found);
  });
</script>
</head>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    for name in ("one", "two"):
        trainer = make_trainer(
            logging_dir=folder,
            run_name=name,
            ledger=True,
            model_path=str(folder / name),
            monitor=["grad_norm", "time_split", "record_goodput"],
        )
        trainer.fit(Linear(), make_points(16), make_points(4))
    path = folder / "page.html"
    write_report([read_run(folder / name / name) for name in ("one", "two")], path)
    return path


def browse(*arguments: str, profile: Path) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_the_page_works_in_a_browser(page: Path, tmp_path: Path) -> None:
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</head>", PROBE, 1))
    done = browse("--window-size=1280,2000", "--dump-dom", f"file://{probed}", profile=tmp_path / "profile")
    text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert text is not None, done.stderr
    found = json.loads(unescape(text[1]))
    zoomed = found.pop("zoomed")
    assert zoomed == pytest.approx([0, 1])
    assert found == {
        "errors": [],
        "charts": 5,
        "drawn": True,
        "tables": 1,
        "full": True,
        "overflows": False,
        "lines": 4,
        "replay": "accmt one --step 2",
        "before": "linear",
        "log": "log",
        "seconds": True,
        "left": 2,
        "fetched": [],
    }
    assert "CONSOLE" not in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_a_picture_of_the_page_is_not_empty(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    browse("--window-size=1280,2000", f"--screenshot={picture}", f"file://{page}", profile=tmp_path / "profile")
    assert picture.stat().st_size > 50_000
