"""The notebooks of the examples, executed; their cells fail where something is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.e2e.markdown import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks_and_they_are_kept_without_outputs():
    assert [path.stem for path in NOTEBOOKS] == ["colab", "first_steps", "reading_a_run"]
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs"), path.name


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end(path: Path, tmp_path: Path):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace('"bbcnews/data/*/*.txt"', '"bbcnews/data/*/*7.txt"')  # a tenth
    client = NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    home = {"HOME": str(tmp_path), "IPYTHONDIR": f"{tmp_path}/ipython", "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    client.execute(env={**os.environ, **home, "OMP_NUM_THREADS": "1"})
    assert list(tmp_path.glob("out/*/model.safetensors"))
    outputs = notebook.cells[-1].outputs
    shown = "".join(output.get("text", "") or output.data["image/svg+xml"] for output in outputs)
    assert {"first_steps": "[", "reading_a_run": "accuracy", "colab": "score"}[path.stem] in shown
