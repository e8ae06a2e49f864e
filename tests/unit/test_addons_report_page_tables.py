"""Tables of runs on the page of `accmt report`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accmt.addons.report import read_run
from accmt.addons.report.page import MOST_ROWS, build_page, write_tables
from accmt.addons.report.records import RunRecord
from accmt.tracking import Tracking


def log_run(folder: Path, *tables: Sequence[Sequence[Any]]) -> RunRecord:
    own: dict[str, Any] = {"track_name": "track", "run_name": "run", "logging_dir": folder, "tracker_kwargs": {}}
    tracking = Tracking([], **own, is_main_process=True, verbose=False)
    tracking.start({})
    for step, table in enumerate(tables, 1):
        tracking.media.log_table("generated", ["prompt", "written", "<score>"], table, step)
    tracking.finish("FINISHED")
    return read_run(tracking.run_folder)


def test_the_newest_table_is_shown_and_what_has_changed_is_marked(tmp_path: Path) -> None:
    before = [["p", "<b>old</b>", 0.25], ["q", "same", 1.0]]
    run = log_run(tmp_path, before, [["p", "new & good", 0.5], ["q", "same", 1.0]])
    page = build_page([run])
    shown = page.partition('id="Tables"')[2].partition("</section>")[0]
    assert "step 2 (changes since step 1 are marked)" in shown
    assert "<ins>new &amp; good</ins> <del>&lt;b&gt;old&lt;/b&gt;</del>" in shown
    assert "<ins>0.5</ins> <del>0.25</del>" in shown
    assert "<td>same</td>" in shown
    assert "&lt;score&gt;" in shown


def test_tables_of_other_rows_long_ones_and_missing_ones(tmp_path: Path) -> None:
    run = log_run(tmp_path, [["p", "w", 1]], [["p", "w", number] for number in range(MOST_ROWS + 5)])
    shown = write_tables([run])
    assert "<ins>" not in shown
    assert f"the first {MOST_ROWS} of {MOST_ROWS + 5} rows" in shown
    shutil.rmtree(run.tables["generated"][-1].folder)
    assert "cannot be read" in write_tables([run])
    assert write_tables([log_run(tmp_path / "other")]) == ""
