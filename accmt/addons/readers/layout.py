"""What a format of files has to offer: how many rows each piece of a file has, and rows of a piece."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from accmt.addons.readers.places import DataFile, Numbers
from accmt.errors import MissingPackageError, explain


class Layout(NamedTuple):
    """The pieces of a file.

    Attributes:
        rows: The number of rows of each piece: a row group, a record batch, a shard.
        digest: A digest of the contents, to notice that the file has changed.
        schema: The columns with their types; None if rows may differ in them.
        is_random: Whether single rows are read quickly; otherwise a piece is read whole.
        num_bytes: The memory of all pieces that are read whole.
    """

    rows: Numbers
    digest: str
    schema: str | None = None
    is_random: bool = True
    num_bytes: int = 0


class Piece(Protocol):
    """Rows that were read together."""

    def take(self, rows: Sequence[int]) -> list[Any]:
        """Return rows by their number in the piece."""


class Opened(Protocol):
    """An open file, which is closed when nothing refers to it."""

    def piece(self, number: int) -> Piece:
        """Read a piece."""


class Format(Protocol):
    """Reads files of one format."""

    def examine(self, file: DataFile) -> Layout:
        """Return the pieces of a file.

        Raises:
            DataError: The file is torn.
        """

    def open(self, file: DataFile) -> Opened:
        """Open a file."""


def load_library(where: str, module: str, install: str) -> Any:
    """Import a library.

    Args:
        where: What needs it, for messages.
        module: The module.
        install: What to install.

    Raises:
        MissingPackageError: It is not installed, or something that it imports is not.
    """
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == name
        got = f"{name} is not installed" if is_missing else f"{name} cannot be imported: {error}"
        raise MissingPackageError(explain(where, got, f"the package {name}", f"pip install {install}")) from error
