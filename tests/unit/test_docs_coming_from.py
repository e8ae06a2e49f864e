"""The page for those who come from another trainer names nothing that is not there."""

from __future__ import annotations

import ast
import inspect
import re
from argparse import ArgumentParser
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from accelerate.commands.launch import launch_command_parser

import accmt
from accmt import AcceleratorModule, Trainer, TrainingState
from accmt.callbacks import HOOKS
from accmt.cli.main import COMMANDS
from accmt.compat import HOOK_NAMES as HOOK_ALIASES
from accmt.options.yaml_reader import FIELDS
from accmt.trainer.calls import ALIASES as ARGUMENTS
from tests.e2e.markdown import ROOT, read_table
from tests.tables import each

PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
HPS = SimpleNamespace(**dict.fromkeys(FIELDS))
ROOTS = {"trainer": Trainer, "module": AcceleratorModule, "state": TrainingState, "hps": HPS}
OTHER_WORDS = {"hps_config", "model_path", "batch_idx", "warmup_ratio", "num_warmup_steps", "with", "fit", "backward"}
OTHER_WORDS |= {
    "ord",
    "order",
    "test",
    "self.model",
    "__init__",
    "label_smoothing",
    "on_step",
    "on_epoch",
    "sync_dist",
    "cross_entropy",
    "register_forward_hook",
    "select_columns",
    "rename_column",
    "map",
    "add_special_tokens",
    *("lora", "adapter", "quantization", "kernels", "attn_implementation", "from_pretrained"),  # keys of `hps.model`
    *("data", "validation", "max_length", "chat_template"),  # keys of `hps.sft`
    *("loss: dpo", "loss: dpo_norm", "loss: hinge", "loss: ipo", "loss: kto", "loss: reward", "loss: simpo"),
    *(
        "loss: orpo",
        "loss: distillation",
        "center",
        "reference_folder",
        "gamma",
        "teacher",
        "num_labels: 1",
    ),  # of `hps.prefer`, `hps.model`
    "trainer",
    "python train.py",
    "trainer_config.json",
    "model.double()",
    "torch.cuda.empty_cache()",
}
TABLES = [table for table in re.findall(r"^\|(?:.*\n\|)*.*$", PAGE, re.MULTILINE) if "---" in table]
CELLS = [(*row[:1], row[-1]) for table in TABLES for row in read_table(f"\n{table}")]
SPANS = [span for _, here in CELLS for span in re.findall(r"`([^`]+)`", here)]


def fields_of(kind: type) -> set[str]:
    """Return the attributes that objects of a class have beside those of the class."""
    return {name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})}


def resolve(node: ast.expr) -> Any:
    """Return what a dotted name of the page stands for.

    Raises:
        AttributeError: It stands for nothing.
    """
    if isinstance(node, ast.Name) and node.id in ROOTS:
        return ROOTS[node.id]
    if isinstance(node, ast.Name):
        return accmt if node.id == "accmt" else getattr(accmt if node.id in dir(accmt) else AcceleratorModule, node.id)
    assert isinstance(node, ast.Attribute)
    owner = resolve(node.value)
    is_field = isinstance(owner, type) and node.attr in fields_of(owner)
    return None if is_field else getattr(owner, node.attr)


def check_call(call: ast.Call) -> None:
    """Require that what is called takes these arguments.

    Raises:
        TypeError: It does not.
    """
    called = resolve(call.func)
    names = [keyword.arg for keyword in call.keywords]
    if called is Trainer:
        known = {*inspect.signature(Trainer).parameters, *ARGUMENTS}
        if set(names) - known:
            raise TypeError(f"no arguments of Trainer: {set(names) - known}")
        return
    is_method = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in ROOTS
    given = [None] * (len(call.args) + is_method)
    inspect.signature(called).bind(*given, **dict.fromkeys(map(str, names)))


def parser_of(command: str) -> ArgumentParser:
    """Return the parser of a command of `accmt`."""
    parser = ArgumentParser()
    import_module(f"accmt.cli.{command}").add_arguments(parser)
    return parser


def check_command(words: list[str]) -> None:
    """Require that a line of the shell names a command and options that there are.

    Raises:
        LookupError: It does not.
    """
    program, command, *options = words
    commands = {"accelerate": {"launch", "config"}, "accmt": set(COMMANDS)}[program]
    if command not in commands:
        raise LookupError(" ".join(words))
    parser = launch_command_parser() if program == "accelerate" else parser_of(command)
    known = {option for action in parser._actions for option in action.option_strings}
    if {option for option in options if option.startswith("-")} - known:
        raise LookupError(" ".join(words))


def check(span: str) -> None:
    """Require that what a span names is there.

    Raises:
        Exception: It is not.
    """
    if span in OTHER_WORDS or span in HOOKS or span in HOOK_ALIASES:
        return
    if re.match(r"(accelerate|accmt) \w", span):
        check_command(span.split())
        return
    tree = ast.parse(span, mode="eval").body
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        check_call(call)
    resolve(tree.func if isinstance(tree, ast.Call) else tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("accmt."):
            resolve(node)


@each("span", sorted(set(SPANS)))
def test_what_the_page_tells_to_write_is_there(span):
    check(span)


def test_every_table_of_the_page_is_read():
    assert len(TABLES) == len(re.findall(r"^\|---", PAGE, re.MULTILINE)) == 12
    assert len(SPANS) > 100
