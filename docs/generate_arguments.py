"""Writes what is said of the Trainer's arguments from the docstrings of the settings classes.

    python docs/generate_arguments.py

That is docs/arguments.md, and the part of the Trainer's own docstring that editors show.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import get_args, get_type_hints

from accmt import Trainer
from accmt.options import Settings
from accmt.options.checks import Options
from accmt.options.command_line import read_meanings
from accmt.options.trainer_call import ALIASES

PAGE = Path(__file__).with_name("arguments.md")
SOURCE = Path(inspect.getfile(Trainer))
HPS_CONFIG = "The hyper-parameters: a YAML or JSON file, a dict, or a `HyperParameters` object."

HEAD = """\
# Arguments of `Trainer`

<!-- written by docs/generate_arguments.py from the docstrings in accmt/options; change those -->

Only `hps_config` and `model_path` are required. The arguments from `{first}` to `{last}` may be given by position, all
others by name only. An invalid value is an error when the Trainer is made; a name that does not exist too.

How often something happens is written in one way everywhere: a number and a unit, such as "500 steps", "2 epochs" or
"3 evals", in any spacing; where evaluations and checkpoints are concerned also a fraction, "0.25 epochs" or 0.25. A
step is an optimizer step. A whole number alone counts optimizer steps; that of `patience` evaluations, and that of
`reload_dataloaders_every_n_epochs` epochs.

An argument with parts, such as `failures`, is an object, `Failures(on_nonfinite="skip")`, of which editors complete the
names, or a dict with the same names, as in a file: `{{"on_nonfinite": "skip"}}`. `failures.on_nonfinite` below is such
a part.

An argument that can be off accepts None, False, `[]` and `{{}}` for it. Where no meaning of None is listed, None is the
default, as a key without a value is in a YAML file.

Other spellings that are understood:

{aliases}
"""

HYPER_PARAMETERS = """\
## The hyper-parameters

| argument | default | meaning |
|---|---|---|
| `hps_config` | required | {meaning} See [hyper-parameters](hyper-parameters.md). |
"""


def write_group(group: type) -> str:
    """Return the section of one settings class."""
    title = (group.__doc__ or "").partition("\n")[0].rstrip(".")
    meanings = read_meanings(group)
    rows, hints = [], get_type_hints(group)
    for field in fields(group):
        if field.name == "tracker_kwargs":
            continue
        rows.append(write_row(field, meanings[field.name]))
        parts = [kind for kind in get_args(hints[field.name]) or [hints[field.name]] if is_options(kind)]
        for kind in parts:
            of_parts = read_meanings(kind)
            rows += [write_row(part, of_parts[part.name], f"{field.name}.") for part in fields(kind)]
    if "tracker_kwargs" in meanings:
        rows.append(f"| any other | | {meanings['tracker_kwargs']} |")
    return "\n".join([f"## {title}", "", "| argument | default | meaning |", "|---|---|---|", *rows, ""])


def is_options(kind: object) -> bool:
    """Return whether an argument may be an object with parts."""
    return isinstance(kind, type) and issubclass(kind, Options)


def write_row(field: Field[object], meaning: str, of: str = "") -> str:
    """Return the table row of one argument, or of a part of one."""
    default = "required" if field.default is MISSING else f"`{field.default!r}`".replace("'", '"')
    return f"| `{of}{field.name}` | {default} | {escape(meaning)} |"


def escape(text: str) -> str:
    """Return text in which Markdown sees no HTML; what stands between backticks is safe as it is."""
    parts = text.split("`")
    return "`".join(part.replace("<", "&lt;") if index % 2 == 0 else part for index, part in enumerate(parts))


def write_page() -> str:
    """Return the whole page."""
    parameters = list(inspect.signature(Trainer.__init__).parameters.values())[1:]
    positional = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    aliases = "\n".join(f"- `{alias}` for `{name}`" for alias, name in ALIASES.items())
    return "\n".join(
        [
            HEAD.format(first=positional[0], last=positional[-1], aliases=aliases),
            HYPER_PARAMETERS.format(meaning=HPS_CONFIG),
            *map(write_group, Settings.GROUPS.values()),
        ]
    )


def write_docstring(source: str) -> str:
    """Return the Trainer's source with what its docstring says of each argument."""
    meanings = {name: text for group in Settings.GROUPS.values() for name, text in read_meanings(group).items()}
    meanings |= {"hps_config": HPS_CONFIG}
    parameters = list(inspect.signature(Trainer.__init__).parameters)[1:]
    entries = [_wrap(name, meanings[name]) for name in parameters if name != "kwargs"]
    entries.append(_wrap("**kwargs", meanings["tracker_kwargs"]))
    return re.sub(r"(?s)(?<=    Args:\n).*?(?=\n    Raises:)", lambda _: "\n".join(entries) + "\n", source, count=1)


def _wrap(name: str, meaning: str) -> str:
    return textwrap.fill(f"{name}: {meaning}", 120, initial_indent=" " * 8, subsequent_indent=" " * 12)


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
    SOURCE.write_text(write_docstring(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")
