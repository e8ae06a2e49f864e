"""Prepares a release: `make release VERSION=0.2.0` sets the version, dates the changelog, commits and tags.

Nothing is uploaded or pushed. Everything is checked before the first file is written.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
VERSION_FILE = ROOT / "accmt" / "version.py"
CHANGELOG = ROOT / "docs" / "changelog.md"
CITATION = ROOT / "CITATION.cff"
UNRELEASED = "## Unreleased\n"


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def read_version() -> Version:
    found = re.search(r'^__version__ = "(.+)"$', VERSION_FILE.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"release: no version in {VERSION_FILE}")
    return Version(found[1])


def read_notes() -> str:
    """Return what the changelog says under Unreleased."""
    _, _, below = CHANGELOG.read_text(encoding="utf-8").partition(UNRELEASED)
    return below.partition("\n## ")[0].strip()


def find_faults(wanted: str) -> Iterator[str]:
    """Yield each reason why this version cannot be released from this checkout."""
    try:
        version = Version(wanted)
    except InvalidVersion:
        yield f"VERSION={wanted} is no version; write one such as 0.2.0 or 0.2.0rc1"
        return
    if str(version) != wanted:
        yield f"VERSION={wanted} is written {version}"
    released = [Version(tag[1:]) for tag in git("tag", "--list", "v*").split()]
    if released and version <= max(released):
        yield f"{version} is not greater than {max(released)}, which has a tag"
    if version < read_version():
        yield f"{version} is lower than {read_version()} in {VERSION_FILE.relative_to(ROOT)}"
    if (branch := git("rev-parse", "--abbrev-ref", "HEAD")) != "main":
        yield f"the branch is {branch}; releases are made on main"
    if dirty := git("status", "--porcelain"):
        yield f"there are changes that are not committed: {', '.join(line[2:].strip() for line in dirty.splitlines())}"
    if not re.search(r"^- ", read_notes(), re.MULTILINE):
        yield f"{CHANGELOG.relative_to(ROOT)} has no line under Unreleased: say what a user sees"


def replace(path: Path, pattern: str, text: str) -> None:
    old = path.read_text(encoding="utf-8")
    new, count = re.subn(pattern, text, old, count=1, flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"release: {path} has no line like {pattern}; undo the changes with git checkout .")
    path.write_text(new, encoding="utf-8")


def write_release(version: str, today: date) -> None:
    """Write the version where it stands, commit, and tag the commit with the notes of the changelog."""
    notes = read_notes()
    replace(VERSION_FILE, r'^__version__ = ".+"$', f'__version__ = "{version}"')
    replace(CHANGELOG, f"^{UNRELEASED}", f"{UNRELEASED}\n## {version} ({today})\n")
    replace(CITATION, r"^version: .+$", f"version: {version}")
    replace(CITATION, r"^date-released: .+$", f"date-released: {today}")
    git("commit", "--quiet", "--all", "--message", f"Release {version}")
    git("tag", "--annotate", "--cleanup=verbatim", "--message", f"accmt {version}\n\n{notes}", f"v{version}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="such as 0.2.0")
    version = parser.parse_args().version
    if faults := list(find_faults(version)):
        print("release: not made\n" + "\n".join(f"  - {fault}" for fault in faults), file=sys.stderr)
        return 1
    write_release(version, date.today())
    print(f"release: committed and tagged v{version}; nothing was pushed or uploaded")
    print(f"  look at it   git show v{version}")
    print("  build it     .venv/bin/python -m hatchling build")
    print(f"  publish it   git push origin main v{version}, then upload what is in dist/")
    print(f"  undo it      git tag --delete v{version} && git reset --hard HEAD~1")
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    if any(".example" in url for url in urls.values()):
        print("  before an upload: the addresses in pyproject.toml ([project.urls]) belong to nobody yet")
    return 0


if __name__ == "__main__":
    sys.exit(main())
