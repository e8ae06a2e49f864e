"""What `make docs` does besides mkdocs: the pages are written for GitHub, and this makes a site of them.

- The navigation is read from the tables of docs/index.md, and from those of any `<folder>/index.md` that it links.
- A file of the repository that a page links, such as an example, becomes a page with its code.
- Each page ends with the tests that run its code or read it.
- A page that would fetch a font or a script from elsewhere is a warning, which `--strict` makes an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from tests.e2e.markdown import read_blocks

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SOURCES = "source"
"""The folder of the site with the files of the repository that pages link."""

RUNNER = "tests/e2e/test_docs.py"
"""The test that runs the Python of each page."""

SKIPPED = ("test_docs.py", "test_docs_site.py")
"""Tests that name many pages, and are no evidence for one."""

log = logging.getLogger("mkdocs.hooks.accmt")

_ROW = re.compile(r"^\| \[([^\]]+)\]\(([^)#]+\.md)\) \|", re.MULTILINE)
_OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)\)")
_FETCHED = re.compile(r"<(?:script|img|iframe|source)[^>]+src=[\"']?https?://|<link[^>]+href=[\"']?https?://")
_CANONICAL = re.compile(r"<link[^>]+rel=[\"']?canonical[^>]+>")
_LEXERS = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".md": "markdown", ".toml": "toml"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = [{"Home": "index.md"}, *read_sections(DOCS / "index.md")]
    return config


def read_sections(index: Path) -> list[dict[str, Any]]:
    """Return the sections of a page of contents, as mkdocs wants its navigation: each has its title and its pages."""
    head, *sections = index.read_text(encoding="utf-8").split("\n## ")
    titled = [(section.partition("\n")[0], _ROW.findall(section)) for section in sections]
    return [{title: [read_entry(index, *row) for row in rows]} for title, rows in titled if rows]


def read_entry(index: Path, title: str, link: str) -> dict[str, Any]:
    page = index.parent / link
    path = page.relative_to(DOCS).as_posix()
    if page.name != "index.md":
        return {title: path}
    inside = [read_entry(page, *row) for row in _ROW.findall(page.read_text(encoding="utf-8"))]
    return {title: [path, *inside]}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    pages = [file for file in files.documentation_pages() if file.abs_src_path]
    for path in sorted({path for file in pages for path in links_outside(Path(file.abs_src_path))}):
        if not path.is_file():
            log.warning("a page links %s, which is not a file of the repository", path)
            continue
        files.append(File.generated(config, page_of_source(path), content=show_source(path)))
    return files


def links_outside(page: Path) -> set[Path]:
    """Return the files beyond docs/ that a page links."""
    linked = {(page.parent / link).resolve() for link in _OUTSIDE.findall(page.read_text(encoding="utf-8"))}
    return {path for path in linked if not path.is_relative_to(DOCS)}


def page_of_source(path: Path) -> str:
    return f"{SOURCES}/{path.relative_to(ROOT).as_posix()}.md"


def show_source(path: Path) -> str:
    """Return a page with the code of a file; a search finds the pages that speak of it, not this one."""
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8").rstrip("\n")
    if path.suffix == ".md":
        to_docs = posixpath.relpath(".", posixpath.dirname(page_of_source(path)))
        return text.replace("](../docs/", f"]({to_docs}/")
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n"
    return f"{head}\n``````{_LEXERS.get(path.suffix, 'bash')}\n{text}\n``````\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.generated_by is not None:
        return markdown
    path = Path(str(page.file.abs_src_path))
    here = PurePosixPath(page.file.src_uri).parent.as_posix()

    def lead_to_source(found: re.Match[str]) -> str:
        target = (path.parent / found[1]).resolve()
        if target.is_relative_to(DOCS):
            return found[0]
        return f"]({posixpath.relpath(page_of_source(target), here)})"

    if page.file.src_uri == "index.md":  # its tables are the navigation
        page.meta["hide"] = ["navigation"]
    return f"{_OUTSIDE.sub(lead_to_source, markdown)}\n\n{say_tests(path)}\n"


def say_tests(path: Path) -> str:
    """Return the line that says which tests run the code of a page, and which read it."""
    name = path.relative_to(ROOT).as_posix()
    num_run = len([block for block in read_blocks(path, "python") if block.is_run])
    said = []
    if num_run:
        blocks = "block of this page is" if num_run == 1 else "blocks of this page are"
        said.append(f"The {num_run} Python {blocks} run by `pytest {RUNNER} -k {name}`.")
    if path.parent.name == "reference" and path.name != "index.md":
        said.append("Examples in docstrings are run by `tests/unit/test_docstring_examples.py`.")
    said.append(f"`{RUNNER}` checks links and names.")
    if readers := [f"`{test}`" for test in tests_that_read(path.relative_to(DOCS).as_posix())]:
        said.append(f"Other tests that read this page: {', '.join(readers)}.")
    return f'<p class="checked" markdown>{" ".join(said)}</p>'


def tests_that_read(name: str) -> list[str]:
    """Return the tests that name a page of docs/ in their code."""
    return [path for path, text in read_tests().items() if re.search(rf"[\"'/]{re.escape(name)}[\"']", text)]


@cache
def read_tests() -> dict[str, str]:
    paths = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if path.name not in SKIPPED)
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    for found in _FETCHED.findall(_CANONICAL.sub("", output)):
        log.warning("%s fetches from elsewhere: %s", page.file.src_uri, found)
    return output
