"""The files around the code that nobody runs by hand: workflow, hooks, templates and citation say what is true."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import yaml

import accmt

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOW = ROOT / ".github" / "workflows" / "tests.yml"


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def plan(*targets: str) -> str:
    return subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_workflow_tests_each_python_that_the_package_names():
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: Python :: 3\.\d+$", line)]
    jobs = read_yaml(WORKFLOW)["jobs"]
    assert jobs["versions"]["strategy"]["matrix"]["python"] == named
    assert jobs["versions"]["strategy"]["matrix"]["versions"] == ["lowest", "newest"]
    assert PROJECT["requires-python"] == f">={named[0]}"
    versions = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    assert {".".join(found.split(".")[:2]) for found in re.findall(r"^\| (3\.\d+\.\d+) \|", versions, re.M)} == set(
        named
    )


def test_the_commands_of_the_workflow_exist():
    steps = [step for job in read_yaml(WORKFLOW)["jobs"].values() for step in job["steps"] if "run" in step]
    commands = [line.strip() for step in steps for line in step["run"].splitlines() if line.strip()]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    for command in commands:
        program, *rest = command.split()
        assert program in ("make", "python", ".ci/run"), command
        assert program != "make" or plan(rest[0])
        for folder in re.findall(r"\btests/\w+", command):
            assert (ROOT / folder).is_dir(), command


def test_the_hooks_before_a_commit_are_what_make_lint_does():
    config = read_yaml(ROOT / ".pre-commit-config.yaml")
    entries = [hook["entry"] for repository in config["repos"] for hook in repository["hooks"]]
    lines = re.findall(r"^\.venv/bin/(?:ruff|mypy).*$", plan("lint"), re.MULTILINE)
    assert len(entries) == len(lines)
    assert all(line.startswith(entry) for entry, line in zip(entries, lines, strict=True))


def test_the_citation_is_of_this_version():
    citation = read_yaml(ROOT / "CITATION.cff")
    assert citation["version"] == accmt.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation.keys() >= {"cff-version", "message", "title", "authors", "date-released"}


def test_the_addresses_of_site_and_repository_stand_in_one_place():
    hosts = {url.split("/")[2] for url in PROJECT["urls"].values()}
    assert len(hosts) == 1
    folders = [ROOT / name for name in ("accmt", "docs", "examples", "hps", ".ci", ".github")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix not in (".pyc", ".png", ".webp")]
    files += [path for path in ROOT.iterdir() if path.suffix in (".md", ".yml", ".cff", ".txt")]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.is_file()}
    assert [path for path, text in texts.items() for host in hosts if host in text] == []
