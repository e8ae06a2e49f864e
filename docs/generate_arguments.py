"""Writes docs/arguments.md from the docstrings of the settings classes: `python docs/generate_arguments.py`."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, Field, fields
from pathlib import Path

from accmt import Trainer
from accmt.settings import Settings
from accmt.settings.meanings import read_meanings
from accmt.trainer.arguments import ALIASES

PAGE = Path(__file__).with_name("arguments.md")

HEAD = """\
# Arguments of `Trainer`

<!-- written by docs/generate_arguments.py from the docstrings in accmt/settings; change those -->

Only `hps_config` and `model_path` are required. The arguments from `{first}` to `{last}` may be given by position, all
others by name only. An invalid value is an error when the Trainer is made; a name that does not exist too.

How often something happens is written in one way everywhere: a number and a unit, such as "500 steps", "2 epochs" or "3
evals", in any spacing; where evaluations and checkpoints are concerned also a fraction, "0.25 epochs". A step is an
optimizer step. The plain numbers of `evaluate_every_n_steps`, `log_every`, `patience` and
`reload_dataloaders_every_n_epochs` mean what their names say.

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
    rows = [write_row(field, meanings[field.name]) for field in fields(group) if field.name != "tracker_kwargs"]
    if "tracker_kwargs" in meanings:
        rows.append(f"| any other | | {meanings['tracker_kwargs']} |")
    return "\n".join([f"## {title}", "", "| argument | default | meaning |", "|---|---|---|", *rows, ""])


def write_row(field: Field[object], meaning: str) -> str:
    """Return the table row of one argument."""
    default = "required" if field.default is MISSING else f"`{field.default!r}`".replace("'", '"')
    return f"| `{field.name}` | {default} | {escape(meaning)} |"


def escape(text: str) -> str:
    """Return text in which Markdown sees no HTML; what stands between backticks is safe as it is."""
    parts = text.split("`")
    return "`".join(part.replace("<", "&lt;") if index % 2 == 0 else part for index, part in enumerate(parts))


def write_page() -> str:
    """Return the whole page."""
    parameters = list(inspect.signature(Trainer.__init__).parameters.values())[1:]
    positional = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    aliases = "\n".join(f"- `{alias}` for `{name}`" for alias, name in ALIASES.items())
    meaning = read_meanings(Trainer)["hps_config"]
    return "\n".join(
        [
            HEAD.format(first=positional[0], last=positional[-1], aliases=aliases),
            HYPER_PARAMETERS.format(meaning=meaning),
            *map(write_group, Settings.GROUPS.values()),
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
