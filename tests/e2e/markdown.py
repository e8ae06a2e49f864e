"""Reads the Markdown pages of the repository, and runs the Python in them.

The blocks of a page run one after the other, in one namespace and in the current folder. What the first line of a block
may say:

- `# not run: <reason>`: the block is skipped;
- `# <name>.py`, `# <name>.yaml`: the block is also written to a file of that name;
- `# raises <error>`: the block must raise that error, with the message that the next `text` block shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from accmt.errors import AccmtError

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w-]+\.(?:py|yaml))\n")
_RAISES = re.compile(r"# raises (\w+)\n")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: The page it stands on.
        language: What follows the fence, such as "python"; empty where nothing does.
        text: What is between the fences.
        line: The line of the page on which the text begins.
    """

    page: Path
    language: str
    text: str
    line: int

    @property
    def is_run(self) -> bool:
        """Whether the block is not marked as one that cannot run."""
        return not self.text.startswith("# not run: ")

    @property
    def file_name(self) -> str | None:
        """The file that the block is the content of, if it says so."""
        found = _FILE.match(self.text)
        return found and found[1]

    @property
    def error(self) -> str | None:
        """The error that the block raises, if it says so."""
        found = _RAISES.match(self.text)
        return found and found[1]


def read_blocks(page: Path, language: str | None = None) -> list[Block]:
    """Return the blocks of a page in their order, those of one language if it is given."""
    text = page.read_text(encoding="utf-8")
    blocks = [
        Block(page, found[1], found[2], text.count("\n", 0, found.start(2)) + 1) for found in _FENCE.finditer(text)
    ]
    return [block for block in blocks if language in (None, block.language)]


def read_prose(page: Path) -> str:
    """Return a page without its blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def read_links(page: Path) -> list[str]:
    """Return the targets of a page's links."""
    return _LINK.findall(read_prose(page))


def read_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", read_prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def read_section(page: Path, heading: str) -> str:
    """Return what stands under a heading of the second level, blocks included."""
    return page.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]


def read_table(section: str) -> list[list[str]]:
    """Return the first table of a text: its rows of cells, without head and rule."""
    lines = [line for line in section.partition("\n|")[2].split("\n\n")[0].splitlines() if "|" in line]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines[2:]]


def with_successors(blocks: list[Block]) -> Iterator[tuple[Block, Block | None]]:
    """Yield each block with the one after it."""
    yield from pairwise([*blocks, None])


def write_files(page: Path, folder: Path) -> None:
    """Write the blocks that are files into `folder`."""
    for block in read_blocks(page):
        if block.file_name is not None:
            (folder / block.file_name).write_text(block.text, encoding="utf-8")


def run_python_blocks(page: Path) -> int:
    """Run the Python blocks of a page in the current folder.

    Returns:
        How many were run.

    Raises:
        AssertionError: A block did not raise the error it announces, or its message is not the one shown.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    num_run = 0
    for block, successor in with_successors(read_blocks(page)):
        if block.language != "python" or not block.is_run:
            continue
        code = compile(
            "\n" * (block.line - 1) + block.text, str(page), "exec"
        )  # so that tracebacks name the page's line
        if block.error is None:
            exec(code, namespace)
        else:
            _require_error(block, code, namespace, successor)
        num_run += 1
    return num_run


def _require_error(block: Block, code: Any, namespace: dict[str, Any], shown: Block | None) -> None:
    place = f"{block.page.name}:{block.line}"
    try:
        exec(code, namespace)
    except (AccmtError, NotImplementedError) as error:
        raised = error
    else:
        raise AssertionError(f"{place} did not raise {block.error}")
    assert type(raised).__name__ == block.error, f"{place} raised {raised!r}"
    assert shown is not None, f"{place}: its message does not follow"
    assert f"{raised}\n" == shown.text, f"{place}: the message is\n{raised}"
