"""Generates docs/arguments.md and the arguments in the Trainer's docstring from the settings classes' docstrings.

python docs/generate_arguments.py
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import get_args, get_type_hints

from accmt import Trainer
from accmt.addons.command_line import read_meanings
from accmt.options import Settings
from accmt.options.checks import Options
from accmt.trainer.calls import ALIASES

PAGE = Path(__file__).with_name("arguments.md")
SOURCE = Path(inspect.getfile(Trainer))
HPS_CONFIG = "The hyper-parameters: a YAML or JSON file, a dict, or a `HyperParameters` object."

FIRST = {
    "hps_config": "epochs, batch size, optimizer and scheduler: [hyper-parameters](hyper-parameters.md)",
    "model_path": "the folder of the saved model",
    "model_saving": 'which model is saved: `"best_valid_loss"`, `"best_accuracy"`, `"last"`: [saving](saving.md)',
    "metrics": '`["accuracy", "f1"]`, or your own: [metrics](metrics.md)',
    "evaluate_every_n_steps": "when to evaluate; by default after each epoch",
    "log_with": '`"tensorboard"`, `"mlflow"`, `"wandb"`: [trackers](trackers.md)',
    "mixed_precision": '`"bf16"` or `"fp16"`',
    "resume": '`"auto"` continues an interrupted run: [checkpoints](checkpoints.md)',
    "clip_grad": "the maximum gradient norm",
    "patience": "stops after this many evaluations without improvement",
}
"""The arguments that most scripts set."""

HEAD = """\
# Arguments of `Trainer`

<!-- written by docs/generate_arguments.py from the docstrings in accmt/options; change those -->

Look up an argument of the Trainer. These ten are enough for most scripts, and only the first two are required:

| argument | what it sets |
|---|---|
{first}

```python
# not run: a sketch
Trainer("hps.yaml", "out/model", metrics="accuracy", model_saving="best_accuracy", mixed_precision="bf16", patience=3)
```

The tables below list all arguments by topic. Arguments that take options have their own tables [at the end](#options).

- **Position.** Only the arguments from `{positional}` to `{last}` can be passed by position.
- **Intervals.** An interval is a number and a unit, such as "500 steps", "2 epochs" or "3 evals". For evaluations and
  checkpoints, it can also be a fraction of an epoch, such as "0.25 epochs" or 0.25. A whole number without a unit
  counts optimizer steps (`patience`: evaluations; `reload_dataloaders_every_n_epochs`: epochs).
- **Options.** Arguments such as `failures` take an object, for example `Failures(on_nonfinite="skip")`, or a dict with
  the same names, `{{"on_nonfinite": "skip"}}`. With an object, editors can complete the names.
- **Off.** None, False, `[]` and `{{}}` disable an argument that can be disabled. If the table does not say what None
  means, it means the default.
- **Aliases.** You can also write {aliases}.
"""

BY_TOPIC = f"""\
## By topic

| argument | default | meaning |
|---|---|---|
| `hps_config` | required | {HPS_CONFIG} |
"""

OPTIONS = """\
## Options

"""


def write_group(group: type) -> str:
    """Return the section of one settings class."""
    title = (group.__doc__ or "").partition("\n")[0].rstrip(".")
    meanings = read_meanings(group)
    rows = [write_row(field, meanings[field.name]) for field in fields(group) if field.name != "tracker_kwargs"]
    if "tracker_kwargs" in meanings:
        rows.append(f"| any other | | {meanings['tracker_kwargs']} |")
    return "\n".join([f"### {title}", "", "| argument | default | meaning |", "|---|---|---|", *rows, ""])


def write_options() -> str:
    """Return a section for each argument that is an object."""
    found = []
    for group in Settings.GROUPS.values():
        hints = get_type_hints(group)
        for field in fields(group):
            for kind in _kinds_in(hints[field.name]):
                if isinstance(kind, type) and issubclass(kind, Options):
                    meanings = read_meanings(kind)
                    rows = [write_row(part, meanings[part.name]) for part in fields(kind)]
                    head = [
                        f"### `{kind.__name__}` for `{field.name}`",
                        "",
                        "| option | default | meaning |",
                        "|---|---|---|",
                    ]
                    found.append("\n".join([*head, *rows, ""]))
    return "\n".join(found)


def _kinds_in(hint: object) -> list[object]:
    """Return the types that an annotation names, at any depth."""
    return [kind for part in get_args(hint) for kind in _kinds_in(part)] or [hint]


def write_row(field: Field[object], meaning: str) -> str:
    """Return the table row of one argument, or of an option."""
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
    aliases = ", ".join(f"`{alias}` for `{name}`" for alias, name in ALIASES.items())
    first = "\n".join(f"| `{name}` | {text} |" for name, text in FIRST.items())
    head = HEAD.format(first=first, positional=positional[0], last=positional[-1], aliases=aliases)
    return "\n".join([head, BY_TOPIC, *map(write_group, Settings.GROUPS.values()), OPTIONS + write_options()])


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
