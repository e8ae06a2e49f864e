"""The site in a real browser, opened as files: its search finds pages, and nothing is fetched or complained about.

Needs Chromium (Debian, Ubuntu: `apt-get install chromium`), and is skipped where there is none.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from tests.e2e.markdown import ROOT
from tests.e2e.test_report_browser import CHROMIUM, browse

PROBE = """
<pre id="found"></pre>
<script>
  const found = { errors: [] };
  window.addEventListener("error", event => found.errors.push(event.message));
  window.addEventListener("load", () => setTimeout(() => {
    const links = [...document.querySelectorAll(".md-search-result__link")].map(link => link.getAttribute("href"));
    found.results = links.map(link => link.split("/").pop().split("?")[0]);
    found.elsewhere = performance.getEntriesByType("resource").map(e => e.name).filter(n => !n.startsWith("file:"));
    found.tooWide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
    document.getElementById("found").textContent = JSON.stringify(found);
  }, 8000));
</script>
</body>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="no mkdocs-material: the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("size", ["1400,900", "390,844"], ids=["desktop", "phone"])
def test_the_search_finds_pages_without_a_server(site: Path, tmp_path: Path, size: str):
    page = site / "index.html"
    probed = site / "probed.html"
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE, 1), encoding="utf-8")
    address = f"file://{probed}?q=checkpoint"
    done = browse(f"--window-size={size}", "--dump-dom", address, profile=tmp_path / "profile")
    text = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.S)
    assert text is not None, done.stderr
    found = json.loads(unescape(text[1]))
    assert "checkpoints.html" in found.pop("results")
    assert found == {"errors": [], "elsewhere": [], "tooWide": False}
