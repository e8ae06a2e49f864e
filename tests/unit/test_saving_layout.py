import json

import pytest

from accmt.saving.weights import PICKLE, SAFETENSORS, files_of, remove_unnamed_shards


def touch(folder, *names):
    for name in names:
        (folder / name).touch()


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ([], "adapter_model.safetensors"),
        (["adapter_model.bin"], "adapter_model.bin"),
        (["adapter_model.bin", "adapter_model.safetensors"], "adapter_model.safetensors"),
    ],
)
def test_the_weights_of_an_adapter_are_those_that_peft_reads(tmp_path, present, expected):
    touch(tmp_path, "adapter_config.json", *present)
    assert files_of(tmp_path / "adapter_config.json") == [expected]


def test_only_our_shards_that_nothing_names_are_removed(tmp_path):
    named, unnamed = (SAFETENSORS.shard(digest * 16, "-00001-of-00002") for digest in "ab")
    other_form = PICKLE.shard("c" * 16, "-00001-of-00001")
    foreign = ["model-00001-of-00002.safetensors", "notes.txt", "adapter_model.bin"]
    touch(tmp_path, named, unnamed, other_form, *foreign)
    (tmp_path / SAFETENSORS.index).write_text(json.dumps({"weight_map": {"a": named}}))
    remove_unnamed_shards(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {named, SAFETENSORS.index, *foreign}
