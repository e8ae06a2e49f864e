import os
import random
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from accmt.data.fingerprints import compare, fingerprint, read_rows, rows_of_samples
from tests.tables import each


class Opened(Dataset):
    """Opens a file when it is first read, as people do for files that no fork may share."""

    handle = None

    def __init__(self):
        self.read = 0

    def __getitem__(self, index):
        self.read += 1
        self.handle = object()
        if index == 0:
            raise OSError("a sample that cannot be read")
        noise = [torch.rand(2), np.random.rand(2), random.random()]
        return {
            "x": torch.tensor(float(index)),
            "drawn": noise,
            "fresh": torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8),
        }

    def __len__(self):
        return 100


def test_what_is_drawn_from_the_seeded_generators_is_equal_and_what_is_not_is_left_out():
    one, other = (read_rows(Opened(), 100, num_workers=0) for _ in range(2))
    assert one == other
    assert sorted(one) == ["1", "33", "66", "99"]
    assert {path.split()[0] for path in one["1"]} == {".x", ".drawn.0", ".drawn.1", ".drawn.2"}


def test_with_workers_samples_are_read_in_one_and_nothing_changes_here():
    data = Opened()
    assert read_rows(data, 100, num_workers=2) == read_rows(Opened(), 100, num_workers=0)
    assert (data.read, data.handle) == (0, None)


@dataclass
class Pair:
    image: object
    label: int


def picture(seed, *, size=32):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8))


@each(
    "make",
    [
        lambda i: i,
        lambda i: float(i),
        lambda i: f"text {i}",
        lambda i: [1, 2, [i, "a"]],
        lambda i: {"input_ids": [7, 8, i], "mask": [1, 1, 1]},
        lambda i: (torch.full((3, 8, 8), float(i)), 1),
        lambda i: {"x": {"y": [torch.tensor([i, 1])]}},
        lambda i: torch.full((2,), i, dtype=torch.bfloat16),
        lambda i: np.array([f"a{i}"]),
        lambda i: np.float32(i),
        lambda i: picture(i),
        lambda i: Pair(picture(i), 3),
        lambda i: {"text": f"{i}", "other": object()},
    ],
)
def test_samples_of_every_kind_are_told_apart(make):
    rows = rows_of_samples([make(i) for i in range(5)])
    assert compare(rows, rows_of_samples([make(i) for i in range(5)])) == "same"
    assert compare(rows, rows_of_samples([make(i) for i in (4, 3, 2, 1, 0)])) == "different"
    assert compare(rows, rows_of_samples([make(i) for i in range(1, 6)])) == "different"


def test_what_is_of_an_unknown_type_is_left_out():
    cyclic: list = []
    cyclic.append(cyclic)
    assert fingerprint(object()) == fingerprint(torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)) == {}
    assert compare({"0": {}}, {"0": fingerprint(3)}) == "same"


def test_augmented_images_of_the_same_labels_are_the_same_data_and_of_others_are_not():
    def rows(seed, labels):
        return rows_of_samples([(picture(seed + i), label) for i, label in enumerate(labels)])

    assert compare(rows(0, [3, 1, 4, 1, 5]), rows(10, [3, 1, 4, 1, 5])) == "partly"
    assert compare(rows(0, [3, 1, 4, 1, 5]), rows(10, [2, 7, 1, 8, 2])) == "different"
    assert compare(rows(0, [1, 1, 1, 1, 1]), rows(10, [1, 1, 1, 1, 1])) == "different"  # tells nothing apart


def test_another_decoder_may_round_pixels_and_sounds_differently_but_features_are_exact():
    sound = np.random.default_rng(0).normal(size=4000).astype(np.float32)
    assert compare(rows_of_samples([sound]), rows_of_samples([sound + 1e-3])) == "same"
    image = np.asarray(picture(0)).clip(1, 254)
    assert compare(rows_of_samples([image]), rows_of_samples([image + 1])) == "same"
    assert compare(rows_of_samples([torch.tensor([100.0])]), rows_of_samples([torch.tensor([101.0])])) == "different"
