"""The page for those who come from another trainer names nothing that is not there."""

from __future__ import annotations

import ast
import inspect
import re
from argparse import ArgumentParser
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser

import accmt
from accmt import AcceleratorModule, Trainer, TrainingState
from accmt.addons.hints.arguments import JOINED, REPLACED, example_of
from accmt.addons.hints.methods import FOREIGN_METHODS
from accmt.addons.hints.table import FOREIGN
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


@pytest.mark.parametrize(
    "span",
    [
        "Trainer(log_evry=1)",
        "trainer.fitt",
        "trainer.validate(ckpt=1)",
        "hps.lr",
        "module.loggs",
        "accmt.WandBee",
        "Trainer(log_with=accmt.Nope)",
        "on_epoch_ends",
        "accelerate launch --num_procs 2 train.py",
        "accmt start train.py",
        "accmt launch --processes 2 train.py",
    ],
)
def test_the_check_sees_what_is_not_there(span):
    with pytest.raises((AttributeError, TypeError, LookupError)):
        check(span)


def test_every_table_of_the_page_is_read():
    assert len(TABLES) == len(re.findall(r"^\|---", PAGE, re.MULTILINE)) == 11
    assert len(SPANS) > 100


@each(
    ("what", "instead"),
    [
        ("devices", "--num_processes"),
        ("num_nodes", "--num_machines 2 --machine_rank 0 --main_process_ip"),
        ("truncated back-propagation", "ExtendedAcceleratorModule"),
        ("several optimizers", "ExtendedAcceleratorModule"),
        ("strategy", "DDP"),
        ("plugins", "kwargs_handlers"),
        ("Apex", "mixed_precision"),
        ("fault-tolerant", 'resume="auto"'),
    ],
)
def test_what_is_not_here_is_named_with_what_to_do_instead(what, instead):
    rows = read_table(PAGE.partition("## Not here\n")[2])
    assert any(what in there and instead in here for there, here in rows)


NOT_HERE = PAGE.partition("## Not here\n")[2]
ON_THE_PAGE = {
    "Lightning's Trainer": "## Lightning\n",
    "transformers' TrainingArguments": "## transformers\n",
    "transformers' Trainer": "## transformers\n",
    "TRL's SFTTrainer": "## TRL\n",
}


def rows_of(owner: str) -> list[list[str]]:
    """Return the rows about another trainer's arguments, those about what is not here among them."""
    return read_table(PAGE.partition(ON_THE_PAGE[owner])[2]) + read_table(NOT_HERE)


def names_in(cell: str) -> set[str]:
    """Return the names of arguments in the first cell of a row."""
    return {found[1] for found in re.finditer(r"`([a-z]\w*)(?:=[^`]*)?`", cell)}


def essence(here: str) -> set[str]:
    """Return the names in an advice that a reader would look for: the keyword, the hyper-parameter or the command."""
    found = re.match(r"(\w+): ", here)
    keywords = re.findall(r"(\w+)=", here)
    if found:
        return {f"hps.{found[1]}"}
    if here.startswith("def "):
        return {re.split(r"[ (]", here)[1]}
    return {*keywords} or {*re.findall(r"(\w+)\(", here)[-1:]} or {here.partition(" ")[0]}


def told_about(owner: str, name: str) -> str:
    """Return what rows of the page say about an argument of another trainer."""
    return " ".join(cells[-1] for cells in rows_of(owner) if name in names_in(cells[0]))


ON_BOTH = [(owner, name) for owner in ON_THE_PAGE for name in FOREIGN[owner] if told_about(owner, name)]


def test_the_page_explains_what_the_error_cannot():
    assert len(ON_BOTH) > 25


@each(("owner", "name", "here"), [(owner, name, example_of(name)) for owner, name in ON_BOTH])
def test_the_page_advises_what_the_error_about_a_foreign_name_does(owner, name, here):
    told = told_about(owner, name)
    assert {word for word in essence(here) if word not in told} == set()


@pytest.mark.parametrize("owner", ["Lightning's Trainer", "transformers' TrainingArguments"])
def test_every_argument_on_the_page_is_known_to_the_error_or_is_one_here(owner):
    known = {name for names in FOREIGN.values() for name in names}
    known |= {*inspect.signature(Trainer).parameters, *ARGUMENTS, *FIELDS, *JOINED, *REPLACED}
    known |= {name for names in FOREIGN_METHODS.values() for name in names}
    rows = read_table(PAGE.partition(ON_THE_PAGE[owner])[2])
    names = {name for cells in rows if not cells[-1].startswith("nothing") for name in names_in(cells[0])}
    assert len(names) > 15
    assert names - known == set()


OF_API = {*HOOKS, *dir(AcceleratorModule), *dir(Trainer), *inspect.signature(Trainer).parameters, *dir(accmt)}
COMMON = {
    "metrics",
    "AcceleratorModule",
    "Trainer",
    "accmt",
    "model",
    "module",
    "log",
    "state",
    "step",
    "test",
    "trainer",
    "train",
}


TABLES_OF_METHODS = [table for table in TABLES if "`configure_optimizers`" in table or "`create_optimizer`" in table]


def told_about_method(name: str) -> str:
    """Return what rows of the tables of methods say about a method of another trainer."""
    rows = [row for table in TABLES_OF_METHODS for row in read_table(f"\n{table}")]
    return " ".join(row[-1] for row in rows if re.search(rf"`{name}\b", row[0]))


METHODS = [(name, here) for names in FOREIGN_METHODS.values() for name, here in names.items()]


@each(("name", "here"), [(name, here) for name, here in METHODS if told_about_method(name)])
def test_the_page_advises_what_the_error_about_a_foreign_method_does(name, here):
    told = told_about_method(name)
    words = {word for word in re.findall(r"\w+", here) if word in OF_API and not word.startswith("__")} - COMMON
    assert {word for word in words if word not in told} == set()


def test_what_the_page_says_to_write_instead_of_methods_is_known_to_the_error():
    works = {*HOOKS, *HOOK_ALIASES, *dir(AcceleratorModule), "manual_backward"}
    known = works.union(*FOREIGN_METHODS.values())
    names = set()
    for table in TABLES_OF_METHODS:
        names |= {found for row in read_table(f"\n{table}") for found in re.findall(r"`(\w+)(?:\(\w*\))?`", row[0])}
    assert len(TABLES_OF_METHODS) == 2
    assert names - known == {"rank_zero_only"}


def test_every_argument_that_was_added_is_told_to_somebody_or_is_our_own():
    advice = [example_of(name) for names in FOREIGN.values() for name in names]
    told = set(re.findall(r"(\w+)=", " ".join([*SPANS, *advice])))
    told |= {*re.findall(r"`(\w+)`", PAGE), *(name for names in FOREIGN.values() for name in names)}
    added = list(inspect.signature(Trainer).parameters)[33:-1]
    ours = {"metric_options", "tracker_options", "failures", "callbacks", "ledger", "fork"}
    assert [name for name in added if name not in told | ours] == []


def test_hooks_that_a_callback_refuses_are_named_with_the_base_class_that_accepts_them():
    rows = [line for line in PAGE.splitlines() if re.match(r"\| `\w+`", line) and "names work" in line]
    hooks = [line for line in rows if re.match(r"\| `(\w+)`", line)[1] in HOOK_ALIASES]
    assert len(hooks) >= 4
    assert [line for line in hooks if "accmt.compat.OtherHookNames" not in line] == []
