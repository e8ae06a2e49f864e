"""Images of runs on the page of `accmt report`."""

from __future__ import annotations

import re
from base64 import b64decode
from io import BytesIO

import numpy as np
from PIL import Image

from accmt.addons.report import read_run
from accmt.addons.report.page import MOST_IMAGES, MOST_PIXELS, MOST_STEPS_OF_IMAGES, build_page, write_images
from accmt.tracking import Tracking


def log_run(folder, steps=(1, 2), num_images=2, size=(4, 5)):
    tracking = Tracking(
        [],
        track_name="track",
        run_name="<run>",
        logging_dir=folder,
        tracker_kwargs={},
        is_main_process=True,
        verbose=False,
    )
    tracking.start({})
    for step in steps:
        tracking.log({"train_loss": 1.0}, step)
        pixels = np.full((num_images, *size, 3), step, np.uint8)
        tracking.media.log_images({"val/<samples>": pixels, "one": pixels[0]}, step)
    tracking.media.log_table("words", ["a"], [["b"]], 1)
    tracking.finish("FINISHED")
    return read_run(tracking.run_folder)


def images_of(page):
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    return [Image.open(BytesIO(b64decode(content))) for content in found]


def test_the_page_has_the_images_themselves(tmp_path):
    run = log_run(tmp_path)
    page = build_page([run])
    images = images_of(page.partition('id="Images"')[2].partition("</section>")[0])
    assert [image.getpixel((0, 0))[0] for image in images] == [2, 2, 1, 1, 2, 1]  # the newest first
    assert {image.size for image in images} == {(5, 4)}
    assert "val/&lt;samples&gt;" in page
    assert "step 2" in page


def test_only_the_newest_are_shown_and_no_more_than_a_page_bears(tmp_path):
    section = write_images([log_run(tmp_path, steps=range(9), num_images=MOST_IMAGES + 2)])
    assert len(images_of(section)) == MOST_STEPS_OF_IMAGES * (MOST_IMAGES + 1)
    assert re.findall(r"step (\d)", section) == ["8", "7", "6"] * 2
    assert section.count(f"the first {MOST_IMAGES} of {MOST_IMAGES + 2}") == MOST_STEPS_OF_IMAGES


def test_large_images_are_made_small_and_keep_their_shape(tmp_path):
    run = log_run(tmp_path, steps=[1], num_images=1, size=(600, 1200))
    assert {image.size for image in images_of(write_images([run]))} == {(MOST_PIXELS, MOST_PIXELS // 2)}


def test_a_damaged_image_costs_that_image_and_not_the_page(tmp_path):
    run = log_run(tmp_path)
    (newest,) = run.images["one"][-1].folder.glob("*.png")
    newest.write_bytes(b"torn")
    section = write_images([run])
    assert len(images_of(section)) == 5
    assert f"step 2: images in {newest.parent} cannot be read".replace("<", "&lt;").replace(">", "&gt;") in section
