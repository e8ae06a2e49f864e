"""`make release` in a throw-away repository: what it writes, and when it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("accmt/version.py", "docs/release.py", "docs/changelog.md", "CITATION.cff", "pyproject.toml", "Makefile")
IDENTITY = {
    **{f"GIT_{who}_{what}": "a@b.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
}
CHANGELOG = "# Changelog\n\n## Unreleased\n\n### Added\n\n- A new thing.\n\n## 0.1.0 (2026-01-01)\n\n- The first.\n"


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **IDENTITY}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def git(repository: Path, *arguments: str) -> str:
    done = run("git", *arguments, cwd=repository)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository at version 0.1.0, which was released, with one line under Unreleased."""
    folder = tmp_path / "clone"
    for name in COPIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "docs" / "changelog.md").write_text(CHANGELOG)
    (folder / "accmt" / "version.py").write_text('__version__ = "0.1.0"\n')
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "First")
    git(folder, "tag", "v0.1.0")
    return folder


def release(repository: Path, version: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "docs/release.py", version, cwd=repository)


def test_a_release_is_a_commit_and_a_tag_with_version_date_and_notes(repository: Path):
    done = release(repository, "0.2.0")
    assert done.returncode == 0, done.stderr
    today = date.today()
    assert (repository / "accmt" / "version.py").read_text() == '__version__ = "0.2.0"\n'
    assert (
        f"## Unreleased\n\n## 0.2.0 ({today})\n\n### Added\n\n- A new thing.\n"
        in (repository / "docs" / "changelog.md").read_text()
    )
    assert f"version: 0.2.0\ndate-released: {today}" in (repository / "CITATION.cff").read_text()
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "log", "-1", "--format=%s", "v0.2.0") == "Release 0.2.0"
    assert git(repository, "cat-file", "-t", "v0.2.0") == "tag"
    assert "### Added\n\n- A new thing." in git(repository, "tag", "-l", "--format=%(contents)", "v0.2.0")
    assert "nothing was pushed or uploaded" in done.stdout


def test_after_a_release_there_is_nothing_to_release(repository: Path):
    release(repository, "0.2.0")
    assert "no line under Unreleased" in release(repository, "0.3.0").stderr


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("0.1.0", "0.1.0 is not greater than 0.1.0, which has a tag"),
        ("0.0.9", "0.0.9 is lower than 0.1.0 in accmt/version.py"),
        ("two", "VERSION=two is no version"),
        ("0.2.0-rc1", "VERSION=0.2.0-rc1 is written 0.2.0rc1"),
    ],
)
def test_a_version_that_cannot_follow_is_refused(repository: Path, version: str, why: str):
    before = git(repository, "rev-parse", "HEAD")
    done = release(repository, version)
    assert done.returncode == 1
    assert why in done.stderr
    assert git(repository, "rev-parse", "HEAD") == before
    assert git(repository, "tag") == "v0.1.0"
    assert git(repository, "status", "--porcelain") == ""


def test_all_that_is_in_the_way_is_said_at_once(repository: Path):
    git(repository, "switch", "--quiet", "--create", "side")
    (repository / "left").write_text("over")
    done = release(repository, "0.1.0")
    for why in ("not greater", "the branch is side", "not committed: left"):
        assert why in done.stderr


def test_make_release_runs_it_with_its_version():
    def plan(*words: str) -> subprocess.CompletedProcess[str]:
        return run("make", "--dry-run", "release", *words, cwd=ROOT)

    assert "docs/release.py 0.2.0" in plan("VERSION=0.2.0").stdout
    assert "make release VERSION=0.2.0" in plan().stdout + plan().stderr
