import json
import math
import platform
from datetime import UTC, datetime

import pytest
import torch
import xxhash

import accmt
from accmt.checkpoint.manifest import (
    Checkpoint,
    Damage,
    FileEntry,
    Manifest,
    examine,
    read_checkpoint,
    read_manifest,
    write_manifest,
)
from accmt.errors import CheckpointCorruptError, CheckpointError, NoCheckpointError
from tests.checkpoints import cut_in_half, delete, empty, flip, grow, truncate, write_version
from tests.raising import raises_at

INFO = {"epoch": 2, "samples_seen": 3840, "best": math.inf, "names": ["a", "ü"], "nothing": None}
FILES = {"weights.bin": bytes(range(256)) * 40, "state.json": b'{"step": 120}', "parts/optimizer.bin": b"12345"}


@pytest.fixture
def folder(tmp_path):
    """A complete checkpoint."""
    path = tmp_path / "step-00000120"
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    entries = {name: FileEntry.of(path / name) for name in FILES}
    write_manifest(path, Manifest.of_this_run(step=120, sequence=3, files=entries, info=INFO))
    return path


def test_a_complete_checkpoint_is_read_with_all_that_was_said_about_it(folder):
    checkpoint = read_checkpoint(folder)
    assert (checkpoint.folder, checkpoint.step, checkpoint.info) == (folder, 120, INFO)
    manifest = checkpoint.manifest
    assert (manifest.sequence, manifest.processes, manifest.threads) == (3, 1, 1)
    versions = {"accmt": accmt.__version__, "torch": torch.__version__, "python": platform.python_version()}
    assert manifest.versions == versions
    assert abs((datetime.now(UTC) - datetime.fromisoformat(manifest.time)).total_seconds()) < 60
    assert examine(folder) == checkpoint


def test_the_manifest_can_be_checked_without_accmt(folder):
    content = json.loads((folder / "manifest.json").read_text())
    assert content["version"] == 2
    for name, entry in content["files"].items():
        data = (folder / name).read_bytes()
        assert entry == {"size": len(data), "xxh3_64": xxhash.xxh3_64_hexdigest(data)}
    own = content.pop("manifest_xxh3_64")
    assert own == xxhash.xxh3_64_hexdigest(json.dumps(content, ensure_ascii=False).encode())
    assert list(content["files"]) == sorted(FILES)


@pytest.mark.parametrize("info", [{1: "a", "pair": (1, 2)}, {"text": "NaN"}, {"number": -0.0, "large": 2**70}])
def test_values_that_json_changes_do_not_look_like_damage(folder, info):
    entries = {name: FileEntry.of(folder / name) for name in FILES}
    write_manifest(folder, Manifest.of_this_run(step=120, sequence=3, files=entries, info=info))
    assert isinstance(examine(folder), Checkpoint)


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


def loop(path):
    path.unlink()
    path.symlink_to(path)


DAMAGES = [truncate, cut_in_half, flip, empty, delete, grow, replace_by_folder, loop]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_damage_to_a_file_is_named(folder, name, damage):
    damage(folder / name)
    with raises_at(CheckpointCorruptError, "step-00000120", name):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "damage",
    [
        delete,
        empty,
        cut_in_half,
        replace_by_folder,
        lambda path: path.write_text("[]"),
        lambda path: path.write_text("{}"),
        lambda path: path.write_text(path.read_text().replace("3840", "3841")),
        lambda path: path.write_bytes(b"\xff" + path.read_bytes()),
    ],
)
def test_every_damage_to_the_manifest_is_named(folder, damage):
    damage(folder / "manifest.json")
    with raises_at(CheckpointCorruptError, "step-00000120", "manifest.json"):
        read_checkpoint(folder)


def test_no_flipped_byte_of_the_manifest_changes_what_is_read(folder):
    whole = read_manifest(folder)
    path = folder / "manifest.json"
    content = path.read_bytes()
    outcomes = []
    for position in range(len(content)):
        flip(path, position)
        found = read_manifest(folder)
        outcomes.append(isinstance(found, Damage) or found == whole)
        path.write_bytes(content)
    assert all(outcomes)


def test_a_manifest_of_a_future_version_says_which_accmt_reads_it(folder):
    write_version(folder, 3, versions={"accmt": "9.1.0"}, files="in another form")
    with raises_at(CheckpointError, "step-00000120", "format 3", "accmt 9.1.0", do="accmt 9.1.0") as raised:
        read_checkpoint(folder)
    assert not isinstance(raised.value, CheckpointCorruptError)
    write_version(folder, 4, versions=None)
    with raises_at(CheckpointError, "step-00000120", "format 4"):
        read_checkpoint(folder)


@pytest.mark.parametrize("more", [{"unknown": 1}, {"files": []}, {"files": {"a": {"size": 1}}}])
def test_a_manifest_of_this_version_with_other_entries_is_damaged(folder, more):
    write_version(folder, 2, **more)
    with raises_at(CheckpointCorruptError, "step-00000120", "manifest.json", "format 2"):
        read_checkpoint(folder)


def test_where_there_is_no_checkpoint_the_message_says_what_there_is(folder, tmp_path):
    with raises_at(NoCheckpointError, str(tmp_path / "nowhere")):
        read_checkpoint(tmp_path / "nowhere")
    with raises_at(NoCheckpointError, str(tmp_path), "1 checkpoint", do="step-00000120"):
        read_checkpoint(tmp_path)
    (tmp_path / "other").mkdir()
    with raises_at(NoCheckpointError, str(tmp_path / "other"), "manifest.json"):
        read_checkpoint(tmp_path / "other")
    with raises_at(NoCheckpointError, "weights.bin"):
        read_checkpoint(folder / "weights.bin")
