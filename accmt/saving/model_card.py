"""What lies beside the weights in a model folder: what the model is, how good, and how it was made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from accmt.files import dumps, write_text
from accmt.options.monitor import Monitor
from accmt.secrets import hide, hide_text

CARD_NAME = "README.md"
HPS_NAME = "hps.yaml"
TRAINER_NAME = "trainer_config.json"
_NOTHING = object()
_JOINED_OPTIONS = ("metric_options", "failures", "torch_flags", "tracker_delivery", "limit_batches")
CARD_MARK = "<!-- accmt writes this file again at each save; without this line it is yours and stays as it is. -->"
HPS_MARK = "# accmt writes this file again at each save; without this line it is yours and stays as it is."
TRAINER_MARK = '"hps_config":'


def write_model_card(folder: Path, *, head: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any] | str]) -> bool:
    """Write `README.md`, unless there is one that accmt did not write.

    Args:
        head: What the hub reads, as YAML at the top, such as `library_name` and `base_model`.
        sections: By heading: a table of names and values, or a command. Empty ones are left out.

    Processes: main only.
    """
    parts = [f"---\n{yaml.safe_dump(hide(dict(head)), sort_keys=False)}---", CARD_MARK, f"# {_name(folder)}"]
    parts += [f"## {heading}\n\n{_write_section(hide(content))}" for heading, content in sections.items() if content]
    return _replace_own(folder / CARD_NAME, CARD_MARK, hide_text("\n\n".join(parts) + "\n"))


def write_hps(folder: Path, hps: Mapping[str, Any]) -> bool:
    """Write `hps.yaml`, from which `Trainer(hps_config=...)` trains again; unless somebody else's is there.

    Secrets are left out.

    Processes: main only.
    """
    text = yaml.safe_dump(hide(dict(hps), leave_out=True), sort_keys=False)
    return _replace_own(folder / HPS_NAME, HPS_MARK, f"{HPS_MARK}\n{text}")


def write_trainer_config(folder: Path, arguments: Mapping[str, Any]) -> bool:
    """Write `trainer_config.json`, of which `Trainer.from_config` makes the Trainer again; unless another's is there.

    What no file can hold, such as callbacks and functions, is left out; so are secrets.

    Processes: main only.
    """
    plain = hide(_to_plain(arguments), leave_out=True)
    others = {name: value for name, value in plain.items() if name != "hps_config"}
    held = {name: kept for name, value in others.items() if (kept := _writable_part(name, value)) is not _NOTHING}
    held["hps_config"] = hide(arguments["hps_config"], leave_out=True)
    return _replace_own(folder / TRAINER_NAME, TRAINER_MARK, dumps(held, indent=2) + "\n")


def _to_plain(value: Any) -> Any:
    """Return an argument in the form in which a file can give it."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, timedelta):
        return {"seconds": value.total_seconds()}
    if isinstance(value, Monitor):
        return _to_plain(vars(value))
    if isinstance(value, Mapping):
        return {_to_key(name): _to_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_to_plain(item) for item in value]
    return value


def _to_key(name: Any) -> Any:
    return str(name) if type(name) is int else name  # JSON has text alone, and `Trainer.from_config` reads it as meant


def _writable_part(name: str, value: Any) -> Any:
    """Return what of an argument a file can hold; of options that stand together, each is kept by itself."""
    if name in _JOINED_OPTIONS and isinstance(value, dict):
        kept = {key: item for key, item in value.items() if _can_be_written(item)}
        return kept if kept or not value else _NOTHING
    return value if _can_be_written(value) else _NOTHING


def _can_be_written(value: Any) -> bool:
    try:
        return bool(json.loads(dumps(value)) == value)  # infinity would come back as text
    except TypeError:
        return False


def _name(folder: Path) -> str:
    return folder.resolve().name


def _write_section(content: Mapping[str, Any] | str) -> str:
    if isinstance(content, str):
        return f"```bash\n{content}\n```"
    rows = [f"| {_write_cell(name)} | {_write_cell(value)} |" for name, value in content.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _write_cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _replace_own(path: Path, mark: str, text: str) -> bool:
    if path.is_file() and mark not in path.read_text(encoding="utf-8", errors="replace"):
        return False
    write_text(path, text)
    return True
