"""Tensors, arrays and Pillow's images become PNG files with the same pixels."""

import numpy as np
import pytest
import torch
from PIL import Image

from accmt.addons.media import to_images, write_images
from accmt.errors import ArgumentError, DataError
from accmt.tracking.values import Media, read_image
from tests.raising import raises_at

RGB = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)


def pixels(images):
    return [np.asarray(image) for image in images]


def round_trip(given, folder):
    write_images(to_images("samples", given), folder)
    paths = sorted(folder.glob("*.png"))
    return pixels(map(read_image, paths))


def assert_same(images, expected):
    assert len(images) == len(expected)
    for image, own in zip(images, expected, strict=True):
        np.testing.assert_array_equal(image, own)


def test_arrays_have_channels_last_and_tensors_first(tmp_path):
    assert_same(round_trip(RGB, tmp_path), RGB)
    assert_same(round_trip(torch.from_numpy(RGB).permute(0, 3, 1, 2), tmp_path), RGB)


@pytest.mark.parametrize("count", [1, 2, 12, 101])
def test_many_images_keep_their_order(tmp_path, count):
    given = np.arange(count, dtype=np.uint8)[:, None, None].repeat(2, 1).repeat(2, 2)
    write_images(to_images("samples", list(given)), tmp_path)
    images = Media("images", "samples", 0, 0.0, tmp_path).images()
    assert list(images) == (["samples"] if count == 1 else [f"samples/{number}" for number in range(count)])
    assert_same(pixels(images.values()), given)


def test_one_image_needs_no_batch_and_a_grey_one_no_channel(tmp_path):
    assert_same(round_trip(RGB[0], tmp_path), RGB[:1])
    assert_same(round_trip(torch.from_numpy(RGB[0]).permute(2, 0, 1), tmp_path), RGB[:1])
    assert_same(round_trip(RGB[0, :, :, 0], tmp_path), [RGB[0, :, :, 0]])


def test_a_list_may_mix_sizes_and_types(tmp_path):
    small = torch.zeros(3, 2, 2, dtype=torch.uint8)
    images = round_trip([small, RGB[1], Image.new("L", (6, 3), 9)], tmp_path)
    assert_same(images, [np.zeros((2, 2, 3)), RGB[1], np.full((3, 6), 9)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floats_go_from_black_to_white(tmp_path, dtype, caplog):
    tensor = torch.tensor([[[0.0, 0.5, 1.0]]], dtype=dtype, requires_grad=True)
    assert_same(round_trip(tensor, tmp_path), [[[0, 128, 255]]])
    assert caplog.messages == []


def test_floats_outside_are_cut_off_with_one_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("accmt.messages._said", set())
    given = np.array([[-1.0, 0.0, 2.0, np.nan]])
    assert_same(round_trip(given, tmp_path), [[[0, 0, 255, 0]]])
    round_trip(given, tmp_path)
    (warning,) = caplog.messages
    assert "log_images({'samples': ...})\n  got: floats from nan to nan\n  expected: 0 to 1" in warning


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (np.zeros((4, 5, 7), np.uint8), "ndarray of shape [4, 5, 7] and uint8"),
        (torch.zeros(5, 4, 4), "Tensor of shape [5, 4, 4] and torch.float32"),
        (np.zeros((4, 5), np.int64), "int64"),
        (np.zeros(4, np.uint8), "shape [4]"),
        (np.zeros((0, 5), np.uint8), "shape [0, 5]"),
        (torch.zeros(1, 2, 3, 4, 5), "shape [1, 2, 3, 4, 5]"),
        ("picture.png", "str"),
        ([[1, 2], [3, 4]], "list"),
        ([], "no images"),
        (np.zeros((0, 4, 5, 3), np.uint8), "no images"),
    ],
)
def test_what_is_no_image_is_an_error_that_says_so(given, got):
    with raises_at(ArgumentError, "log_images({'samples': ...})", got):
        to_images("samples", given)


@pytest.mark.parametrize("content", [b"", b"no image", None])
def test_a_file_that_a_power_cut_spoiled_is_no_outage(tmp_path, content):
    from accmt.addons.trackers.spec import is_outage

    path = tmp_path / "0.png"
    if content is not None:
        path.write_bytes(content)
    with raises_at(DataError, str(path)) as raised:
        read_image(path)
    assert not is_outage(raised.value)
