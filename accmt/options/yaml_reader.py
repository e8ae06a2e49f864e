"""Reads hyper-parameters from a YAML or JSON file or a dict, with the line of every key."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accmt.errors import (
    HyperParameterError,
    HyperParameterFileError,
    combine,
    describe_value,
    fail,
    nearest,
)
from accmt.options.checks import KeyFault, KeyPath, number_in, read_numbers, to_plain
from accmt.registry import addon

if TYPE_CHECKING:
    import yaml

# ---- Hyper-parameters as written: their names, the location of each key, and error messages.


SECTIONS = {"model": "path", "sft": "data", "prefer": "data", "data": "mix", "evaluation": "generate"}
"""The sections, which add-ons read, each with the key that a plain value in place of the section sets."""

FIELDS = (
    "epochs",
    "batch_size",
    "optim",
    "optim_kwargs",
    "scheduler",
    "scheduler_kwargs",
    "max_steps",
    "max_samples",
    "max_target_tokens",
    "step_scheduler_per_epoch",
    "max_micro_batch_size",
    "max_tokens",
    "packing",
    *SECTIONS,
)
"""The names of all hyper-parameters."""

KEYS = frozenset({*FIELDS, "optimizer"} - {"optim_kwargs", "scheduler_kwargs"})
"""The valid keys of a file; a key without a value is treated as unset."""

_SHOWN = 5


def suggest(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return what to do about an unknown `name`: write the closest one, or `otherwise`."""
    near = nearest(name, names)
    return f"write `{near}`" if near else otherwise


def names_like(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the dotted names most similar to a pattern, or the first ones."""
    parts = set(names)
    for name in names:
        parts.update(name.split("."))
    # Patterns are regular expressions, and the dots of a name are escaped there.
    near = difflib.get_close_matches(pattern.replace("\\", ""), sorted(parts), n=1, cutoff=0.6)
    if not near:
        return list(names[:_SHOWN])
    return [name for name in names if near[0] in name][:_SHOWN]


@dataclass(frozen=True)
class Document:
    """The content of one source, with numbers converted but otherwise unchecked.

    Attributes:
        name: The file, or `hps_config` for a dict, or `HyperParameters` for its constructor.
        values: The keys under `hps`, without those set to null.
        lines: The line of each key; empty if the source is not a file.
        faults: Errors found while reading, such as duplicate keys.
        flags: The keys set by flags.
    """

    name: str
    values: Mapping[str, Any]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    faults: tuple[KeyFault, ...] = ()
    flags: frozenset[KeyPath] = frozenset()

    def where(self, path: KeyPath) -> str:
        """Return the location of a key for messages: `hps/digits.yaml:7 optim.lr`."""
        return self._place(path, self._line(path))

    def reject(self, faults: Iterable[KeyFault]) -> HyperParameterError:
        """Return one error that reports all `faults`, in the order of their lines."""
        errors = []
        for fault in sorted(faults, key=self._line_of):
            where = self._place(fault.path, self._line_of(fault))
            errors.append(fail(HyperParameterError, where, got=fault.got, expected=fault.expected, do=fault.do))
        title = f"{len(errors)} errors in {self.name}" if len(errors) > 1 else None
        return combine(HyperParameterError, errors, title)

    def _line_of(self, fault: KeyFault) -> int:
        return fault.line or self._line(fault.path)

    def _place(self, path: KeyPath, line: int) -> str:
        # A wrong flag is on the command line, not in the file.
        if any(path[: len(flag)] == flag for flag in self.flags):
            return f"--hps.{'.'.join(map(str, path))}"
        file = f"{self.name}:{line}" if line else self.name
        return " ".join([file, ".".join(map(str, path))]).rstrip()

    def _line(self, path: KeyPath) -> int:
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 0)


_SUFFIXES = (".yaml", ".yml", ".json")
_EXAMPLE = "`hps: {epochs: 3, batch_size: 16, optim: {type: AdamW, lr: 1e-4}}`"
_LAYOUT = "a mapping: `hps:` with epochs, batch_size and optim below it"


def read_document(source: object) -> Document:
    """Read a source of hyper-parameters, without checking the values.

    Args:
        source: A path to a .yaml, .yml or .json file, or a dict, with or without the outer `hps`. Not modified.

    Raises:
        HyperParameterTypeError: `source` is something else, and no add-on reads it.
        HyperParameterFileError: There is no such file.
        HyperParameterError: The path is a folder or has another ending, or the content is empty, not valid YAML or
            JSON, or not a mapping.
    """
    if isinstance(source, Mapping):
        return _unwrap("hps_config", read_numbers(to_plain(source)), {}, [])
    if isinstance(source, str | os.PathLike):
        return _read_file(Path(source))
    return read_document(addon("read_source")(source))


def _read_file(path: Path) -> Document:
    import yaml

    name = str(path)
    # Reading it would raise an IsADirectoryError without the name of the argument.
    if path.is_dir():
        raise fail(
            HyperParameterError,
            f"hps_config={name!r}",
            got="a folder",
            expected="a .yaml, .yml or .json file",
            do="pass a file in it",
        )
    if not path.exists():
        files = [str(file) for file in path.parent.glob("*") if file.suffix in _SUFFIXES]
        near = nearest(name, files)
        raise fail(
            HyperParameterFileError,
            f"hps_config={name!r}",
            got=f"no such file; the working directory is {Path.cwd()}",
            expected="a .yaml, .yml or .json file that exists",
            do=f"did you mean {near}?" if near else f"correct the path, or create the file with {_EXAMPLE}",
        )
    # A Python file or a notebook would be read as one long YAML string.
    if path.suffix not in _SUFFIXES:
        got = f"a file ending in {path.suffix!r}"
        raise fail(
            HyperParameterError,
            name,
            got=got,
            expected=f"one of {', '.join(_SUFFIXES)}",
            do="rename it to end in .yaml",
        )
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows put a byte-order mark first
    # Files from Windows editors in another encoding, or a pickle with a wrong name.
    except UnicodeDecodeError as error:
        raise fail(
            HyperParameterError,
            name,
            got=f"bytes that are not text: {error}",
            expected="UTF-8 text",
            do="save it as UTF-8",
        ) from None
    # YAML accepts more than JSON; a trailing comma would be read here and nowhere else.
    if path.suffix == ".json":
        try:
            json.loads(text or "null", parse_int=str)  # as text: Python limits the number of digits
        except json.JSONDecodeError as error:
            where = f"{name}:{error.lineno}"
            raise fail(
                HyperParameterError,
                where,
                got=error.msg,
                expected="JSON",
                do=f"correct line {error.lineno}, column {error.colno}",
            ) from None
        # Thousands of brackets; Python's own traceback would be as long.
        except RecursionError as error:
            raise _unreadable(name, error) from None
        text = text.replace("\t", " ")  # which YAML rejects; JSON allows them between tokens, but not in strings
    reader = _NodeReader(text)
    try:
        values = reader.read_root()
    except (yaml.YAMLError, RecursionError) as error:
        raise _unreadable(name, error) from None  # the parser's frames add nothing
    # PyYAML reads an empty file, and one of comments alone, as None.
    if values is None:
        raise fail(HyperParameterError, name, got="an empty file", expected=_LAYOUT, do=f"write {_EXAMPLE}")
    return _unwrap(name, values, reader.lines, reader.faults)


def _unreadable(name: str, error: Exception) -> HyperParameterError:
    mark = getattr(error, "problem_mark", None)
    line = "" if mark is None else f":{mark.line + 1}"
    got = getattr(error, "problem", None) or str(error)
    do = getattr(error, "note", None) or "indent with spaces, and put one after each `key:`"
    return fail(HyperParameterError, f"{name}{line}", got=got, expected="valid YAML", do=do)


def _unwrap(name: str, root: Any, lines: dict[KeyPath, int], faults: list[KeyFault]) -> Document:
    inner = root
    if isinstance(root, dict):
        inner = root.get("hps", root)
        unindented = [key for key in root if key in KEYS]
        # `hps:` with everything at its level: the commonest mistake of indentation.
        if inner is None and unindented:
            got, do = f"`hps:` without content, next to {', '.join(unindented)}", "indent these keys below `hps:`"
            where = f"{name}:{lines['hps',]}" if ("hps",) in lines else name
            raise fail(HyperParameterError, where, got=got, expected=_LAYOUT, do=do)
    if not isinstance(inner, dict):
        raise fail(HyperParameterError, name, got=describe_value(inner), expected=_LAYOUT, do=f"write {_EXAMPLE}")
    if inner is not root:
        # Paths begin below `hps`, so that they are the same with and without it.
        for index, fault in enumerate(faults):
            if fault.path[:1] == ("hps",):
                faults[index] = replace(fault, path=fault.path[1:])
        for key in root:
            if key == "hps":
                continue
            do = addon("hint_for_key")(key, root) or f"indent `{key}` below `hps:`, or remove it"
            faults.append(KeyFault((key,), "a key next to `hps`", "only `hps` at the top level", do, lines.get((key,))))
        lines = {path[1:]: line for path, line in lines.items() if path[:1] == ("hps",)}
    values = {str(key): value for key, value in inner.items() if value is not None or str(key) not in KEYS}
    return Document(name, values, lines, tuple(faults))


class _NodeReader:
    """Converts YAML nodes to values, and records the line of each key and duplicate keys."""

    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.faults: list[KeyFault] = []
        self._text = text
        self._flattened: set[int] = set()

    def read_root(self) -> Any:
        import yaml  # not at the top: importing accmt loads no package that torch does not load

        self._loader = yaml.SafeLoader(self._text)
        try:
            node = self._loader.get_single_node()
            if node is None:
                return None
            return self._read(node, ())
        finally:
            self._loader.dispose()

    def _read(self, node: yaml.Node, path: KeyPath) -> Any:
        import yaml

        self.lines.setdefault(path, _line(node))
        if isinstance(node, yaml.SequenceNode):
            return [self._read(item, (*path, index)) for index, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            number = number_in(node.value)
            if number is not None:
                return number
            try:
                return self._loader.construct_object(node)
            except ValueError as error:  # an invalid date, or a number with thousands of digits
                raise _fault(node, str(error), "correct this value, or quote it to keep it as a string") from None
        for key_node, _ in node.value:
            # A missing space after a colon makes the line a key; a list as a key cannot be hashed.
            if not isinstance(key_node, yaml.ScalarNode):
                raise _fault(key_node, "a key that is a list or a mapping", "write each key as a single word")
        if id(node) not in self._flattened:  # an anchor is read again for each alias
            self._flattened.add(id(node))
            first: dict[str, int] = {}  # the line of each key
            for key_node, _ in node.value:
                key, line = str(key_node.value), _line(key_node)
                # PyYAML takes the last one silently, so that a value at the top of the file has no effect.
                if key in first:
                    got = f"`{key}` on line {first[key]} and again on line {line}"
                    self.faults.append(KeyFault((*path, key), got, "each key once", "remove one of them", line))
                first.setdefault(key, line)
            self._loader.flatten_mapping(node)
        values = {}
        for key_node, value_node in node.value:
            key = str(self._loader.construct_object(key_node, deep=True))
            self.lines[(*path, key)] = _line(key_node)
            values[key] = self._read(value_node, (*path, key))
        return values


def _fault(node: yaml.Node, got: str, do: str) -> yaml.MarkedYAMLError:
    import yaml

    return yaml.MarkedYAMLError(problem=got, problem_mark=node.start_mark, note=do)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
