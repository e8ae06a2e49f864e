"""Two projects are called `accmt`; where both are installed in one folder, importing it is an error and no mixture."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from accmt.errors import PackageConflictError
from accmt.installation import DISTRIBUTION, require_own_folder

ROOT = Path(__file__).parents[2]
THEIR_INIT = "import torch\nfrom .callbacks import Callback\nfrom .trainer import Trainer\n"


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    """A folder of installed packages with the files of `accmt/`, as links."""
    package = tmp_path / "site-packages" / "accmt"
    package.mkdir(parents=True)
    for entry in (ROOT / "accmt").iterdir():
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    (package.parent / f"{DISTRIBUTION.replace('-', '_')}-0.1.0.dist-info").mkdir()
    return package.parent


def import_in(site_packages: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(site_packages), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=site_packages, env=environment, capture_output=True, text=True, timeout=120)


def test_alone_it_is_imported(site_packages: Path):
    done = import_in(site_packages, "import accmt; print(accmt.__file__); accmt.Callback")
    assert (done.stdout, done.stderr) == (f"{site_packages / 'accmt' / '__init__.py'}\n", "")


@pytest.mark.parametrize("metadata", ["accmt-1.9.5.1.dist-info", "accmt-1.7.6.egg-info"])
def test_after_the_other_project_it_is_an_error(site_packages: Path, metadata: str):
    (site_packages / metadata).mkdir()
    done = import_in(site_packages, "import accmt")
    assert f"accmt {metadata.rpartition('.')[0].removeprefix('accmt-')}, another project" in done.stderr
    assert f"do: pip uninstall --yes accmt {DISTRIBUTION}" in done.stderr
    assert "PackageConflictError" in done.stderr


def test_where_the_other_project_came_last_it_is_an_error_too(site_packages: Path):
    """The other project's `__init__.py` has replaced ours, and finds our folders before its own files."""
    (site_packages / "accmt-1.9.5.1.dist-info").mkdir()
    theirs = site_packages / "accmt" / "__init__.py"
    theirs.unlink()
    theirs.write_text(THEIR_INIT)
    done = import_in(site_packages, "import accmt")
    assert "PackageConflictError" in done.stderr
    assert "accmt 1.9.5.1, another project" in done.stderr


def test_the_error_is_an_import_error_with_what_to_do(tmp_path: Path):
    (tmp_path / "accmt-1.9.5.1.dist-info").mkdir()
    with pytest.raises(ImportError, match=r"accmt 1\.9\.5\.1, another project") as caught:
        require_own_folder(str(tmp_path / "accmt"))
    assert isinstance(caught.value, PackageConflictError)


def test_packages_with_longer_names_and_archives_do_not_matter(tmp_path: Path):
    (tmp_path / "accmt_cli-1.0.dist-info").mkdir()
    require_own_folder(str(tmp_path / "accmt"))
    require_own_folder(str(tmp_path / "packages.zip" / "accmt"))


def test_the_name_is_the_one_that_pip_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == DISTRIBUTION
