import json
import re
from pathlib import Path

import pytest

from accmt import HyperParameters
from accmt.errors import HyperParameterError
from accmt.options.yaml_reader import read_document
from tests.raising import raises_at
from tests.tables import each

YAML = """\
hps:
  epochs: 3
  batch_size: [2, 5]
  optim:
    type: AdamW
    lr: 1e-3
    betas: ["0.9", .98]
"""


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_each_key_keeps_its_line(tmp_path):
    document = read_document(write(tmp_path, "a.yaml", YAML))
    assert document.values["optim"] == {"type": "AdamW", "lr": 0.001, "betas": [0.9, 0.98]}
    assert document.where(("optim", "lr")) == f"{tmp_path}/a.yaml:6 optim.lr"
    assert document.where(("epochs",)).endswith("a.yaml:2 epochs")


def test_a_missing_key_is_placed_at_its_parent(tmp_path):
    document = read_document(write(tmp_path, "a.yaml", YAML))
    assert document.where(("optim", "eps")).endswith("a.yaml:4 optim.eps")
    assert document.where(("scheduler",)).endswith("a.yaml:1 scheduler")


def test_the_outer_hps_may_be_missing(tmp_path):
    bare = "\n".join(line[2:] for line in YAML.splitlines()[1:])
    document = read_document(write(tmp_path, "a.yml", bare))
    assert document.values == read_document(write(tmp_path, "b.yaml", YAML)).values
    assert document.where(("optim", "lr")).endswith("a.yml:5 optim.lr")


def test_json_with_tabs_and_without_spaces_keeps_its_lines(tmp_path):
    text = '{"hps":{\n\t"epochs":3,\n\t"optim":\t{"type":"a\\tb\\/c",\n"lr":"1e-3"}}}'
    document = read_document(write(tmp_path, "a.json", text))
    assert document.values == {"epochs": 3, "optim": {"type": "a\tb/c", "lr": 0.001}}
    assert document.where(("optim", "lr")).endswith("a.json:4 optim.lr")


def test_anchors_and_merges_are_not_taken_for_keys_written_twice(tmp_path):
    text = "hps:\n  a: &base {x: 1, y: 2}\n  b: &more {<<: *base, y: 3}\n  c: *more\n  d: {<<: *more, x: 4}\n"
    document = read_document(write(tmp_path, "a.yaml", text))
    assert document.values["b"] == document.values["c"] == {"x": 1, "y": 3}
    assert document.values["d"] == {"x": 4, "y": 3}
    assert document.faults == ()


def test_keys_written_twice_are_found_at_every_depth(tmp_path):
    text = "hps:\n  epochs: 1\n  optim: {lr: 1,\n    lr: 2}\n  epochs: 2\n"
    first, second = sorted(read_document(write(tmp_path, "a.yaml", text)).faults, key=lambda fault: fault.line)
    assert (first.path, first.line, first.got) == (("optim", "lr"), 4, "`lr` on line 3 and again on line 4")
    assert (second.path, second.line) == (("epochs",), 5)


def test_keys_beside_hps_are_faults(tmp_path):
    (fault,) = read_document(write(tmp_path, "a.yaml", YAML + "max_steps: 3\n")).faults
    assert (fault.path, fault.line, fault.got) == (("max_steps",), 8, "a key next to `hps`")


def test_a_byte_order_mark_and_null_values_are_skipped(tmp_path):
    document = read_document(write(tmp_path, "a.yaml", b"\xef\xbb\xbfhps:\n  epochs: 2\n  scheduler: null\n"))
    assert document.values == {"epochs": 2}


def test_a_dict_is_read_without_changing_it():
    given = {"hps": {"optim": {"lr": "1e-3", "betas": ["0.9"]}}}
    before = json.dumps(given)
    assert read_document(given).values == {"optim": {"lr": 0.001, "betas": [0.9]}}
    assert json.dumps(given) == before


@each("source", [None, 5, ["hps.yaml"], b"hps.yaml"])
def test_a_wrong_type_is_a_type_error_that_names_the_argument(source):
    with raises_at(TypeError, "hps_config", repr(source)):
        read_document(source)


def test_a_missing_file_is_a_file_not_found_error(tmp_path):
    with raises_at(FileNotFoundError, "a.yaml", str(Path.cwd())) as caught:
        read_document(tmp_path / "a.yaml")
    assert isinstance(caught.value, HyperParameterError)
    line = re.search("`(hps: .*)`", str(caught.value))[1]
    assert HyperParameters.from_config(write(tmp_path, "hps.yaml", line)).epochs == 3


@pytest.mark.parametrize(
    ("place", "text", "got"),
    [
        ("a.yaml", "", "empty"),
        ("a.yaml", "# only a comment\n", "empty"),
        ("a.json", "", "empty"),
        ("a.yaml", "hps:\n", "None (NoneType)"),
        ("a.yaml", "- 1\n", "[1] (list)"),
        ("a.yaml", "hps: 3\n", "3 (int)"),
        ("a.yaml:3", "hps:\n  a: 1\n   b: 2\n", "mapping"),
        ("a.yaml:2", "hps:\n\ta: 1\n", r"'\t'"),
        ("a.yaml:2", "a: 1\n---\nb: 2\n", "document"),
        ("a.yaml:1", "a: !!python/name:os.system x\n", "os.system"),
        ("a.yaml", "a: &a [*a]\n", "recursi"),
        ("a.json:2", '{"a": 1,\n"b"}', "':'"),
        ("a.yaml", b"a: \xff", "0xff"),
        ("a.txt", "a: 1", "'.txt'"),
    ],
)
def test_content_that_cannot_be_read_names_file_and_line(tmp_path, place, text, got):
    with raises_at(HyperParameterError, f"/{place}", got) as caught:
        read_document(write(tmp_path, place.split(":")[0], text))
    assert caught.value.__suppress_context__ or caught.value.__context__ is None  # no frames of the parser before it


def test_a_folder_is_refused(tmp_path):
    with raises_at(HyperParameterError, "hps_config='"):
        read_document(str(tmp_path))


def test_a_misspelt_key_without_a_value_is_not_ignored(tmp_path):
    text = "hps:\n  epochs: 1\n  batch_size: 2\n  optim: SGD\n  scheduler:\n  max_step:\n"
    with raises_at(HyperParameterError, "a.yaml:6 max_step", do="`max_steps`"):
        HyperParameters.from_config(write(tmp_path, "a.yaml", text))


@pytest.mark.parametrize(
    ("text", "line", "got"),
    [("? [x]\n: 1\n", 1, "key"), (f"a: 1\nb: {'1' * 5000}\n", 2, "5000 digits"), ("a: 1\nb: 2026-99-99\n", 2, "month")],
    ids=["key", "digits", "date"],
)
def test_what_is_no_value_is_refused(tmp_path, text, line, got):
    with raises_at(HyperParameterError, f"a.yaml:{line}", got):
        read_document(write(tmp_path, "a.yaml", text))
