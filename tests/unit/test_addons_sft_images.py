"""Images in conversations: the mask, token by token; the exact step of a tiny Qwen2-VL; and what is rejected."""

from __future__ import annotations

import json
import random
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accmt import PreferenceModule, SFTModule, Trainer
from accmt.addons.sft import chat
from accmt.addons.sft.chat import IGNORED, mask_row
from accmt.addons.sft.images import ImageError, ImageReader, _align, split_processor
from accmt.addons.sft.rows import Masking
from accmt.errors import AccmtError, DataError
from tests.conversations import draw_conversations, in_parts, trained_texts
from tests.pictures import (
    draw_image,
    draw_picture_conversations,
    gradient_of_step,
    make_image_model,
    make_processor,
    plain_gradient,
)
from tests.raising import raises_at

HPS = {"epochs": 1, "batch_size": 4, "optim": {"type": "SGD", "lr": 1.0}}

drawn = cache(draw_picture_conversations)


@cache
def reader() -> Masking:
    tokenizer, images = split_processor(make_processor())
    return Masking(tokenizer, images=images)


def masked(row: dict[str, Any], **options: Any) -> Any:
    return mask_row(reader().tokenizer, row, images=reader().images, **options)


def say(*contents: Any, **entries: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[place % 2], "content": one} for place, one in enumerate(contents)], **entries}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def picture(seed: int = 0) -> dict[str, Any]:
    return {"type": "image", "image": draw_image(random.Random(seed))}


def test_the_tokens_are_the_processors_and_the_trained_ones_what_the_assistant_writes():
    with_images = 0
    for row in drawn(80):
        found = masked(row)
        expected = make_processor().apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_tensors="pt"
        )
        assert found.input_ids == expected["input_ids"][0].tolist()
        answers = [one["content"][0]["text"] for one in row["messages"] if one["role"] == "assistant"]
        assert trained_texts(make_processor().tokenizer, found) == [f"{answer}<|im_end|>" for answer in answers]
        assert all(label in (IGNORED, token) for token, label in zip(found.input_ids, found.labels, strict=True))
        if found.images is not None:
            with_images += 1
            assert torch.equal(found.images.tensors["pixel_values"], expected["pixel_values"])
            assert torch.equal(found.images.tensors["image_grid_thw"], expected["image_grid_thw"])
            assert found.images.tokens == {"mm_token_type_ids": expected["mm_token_type_ids"][0].tolist()}
    assert with_images > 30


def test_turns_as_samples_have_the_images_before_them():
    row = say([picture(1), text("a")], "b", [picture(2), picture(3), text("c")], "d")
    first, last = (reader()._replace(per_turn=True).read(row, turn, "a row") for turn in (1, 3))
    assert len(first.images.tensors["image_grid_thw"]) == 1
    assert len(last.images.tensors["image_grid_thw"]) == 3
    assert trained_texts(make_processor().tokenizer, last) == ["d<|im_end|>"]


# ---- What a step computes


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return plain_gradient(drawn(8))


@pytest.mark.parametrize(("accumulation", "hps"), [(1, {}), (4, {}), (2, {"max_tokens": 300})])
def test_the_gradient_of_a_step_is_that_of_one_row_after_the_other(
    tmp_path: Path, accumulation: int, hps: dict[str, Any], expected: torch.Tensor
):
    found = gradient_of_step(tmp_path, drawn(8), accumulation, accumulation=accumulation, **hps)
    assert (found - expected).norm() <= 1e-6 * expected.norm()  # transformers computes the loss in float32


def test_a_batch_without_images_runs_the_layers_of_images_and_learns_the_same(tmp_path: Path):
    rows = [in_parts(row) for row in draw_conversations(12, seed=4) if "tools" not in row][:4]
    rows[0]["weight"] = 1.5  # so that the batch has weights of tokens, too
    plain = [{"messages": row["messages"]} for row in rows]
    assert SFTModule(make_image_model(), make_processor()).collate_fn([masked(rows[1]).sample()])["pixel_values"].ndim
    found = gradient_of_step(tmp_path / "one", plain, 2, accumulation=2)
    expected = plain_gradient(plain)
    assert (found - expected).norm() <= 1e-6 * expected.norm()
    other = gradient_of_step(tmp_path / "two", [{**row, "weight": 1.5} for row in plain], 2, accumulation=2)
    assert (other - expected).norm() <= 1e-6 * expected.norm()


def test_a_token_budget_counts_the_tokens_of_images(tmp_path: Path):
    rows, shapes = drawn(8), []
    longest = max(len(masked(row).input_ids) for row in rows)
    module = SFTModule(make_image_model(), make_processor())
    pad = module.collate_fn

    def collate(samples: list[Any]) -> Any:
        batch = pad(samples)
        shapes.append(batch["input_ids"].numel())
        return batch

    module.collate_fn = collate
    hps = {**HPS, "batch_size": 8, "max_tokens": longest + 10}
    Trainer(hps, tmp_path, verbose=False, dataloader_num_workers=0).fit(module, rows)
    assert max(shapes) <= longest + 10
    assert sum(shapes) >= sum(len(masked(row).input_ids) for row in rows)


def test_packing_is_rejected_by_name_where_rows_have_images(tmp_path: Path):
    with raises_at(DataError, "packing in the hyper-parameters", "'pixel_values'"):
        gradient_of_step(tmp_path, drawn(8), 1, accumulation=1, max_tokens=5000, packing=True)


# ---- Where images come from


def test_a_path_bytes_an_array_a_url_of_data_and_images_beside_messages_are_the_same_image(tmp_path: Path):
    image = draw_image(random.Random(1))
    image.save(tmp_path / "one.png")
    written = BytesIO()
    image.save(written, "png")
    import base64

    encoded = f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"
    parts = [
        {"type": "image", "image": image},
        {"type": "image", "path": str(tmp_path / "one.png")},
        {"type": "image", "image": tmp_path / "one.png"},
        {"type": "image", "image": {"bytes": written.getvalue(), "path": None}},
        {"type": "image", "image": {"bytes": None, "path": str(tmp_path / "one.png")}},
        {"type": "image", "image": np.asarray(image)},
        {"type": "image_url", "image_url": {"url": encoded}},
    ]
    rows = [say([part, text("a")], "b") for part in parts]
    rows.append(say([{"type": "image"}, text("a")], "b", images=[image]))
    first, *others = [masked(row).images.tensors["pixel_values"] for row in rows]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("content", "entries", "got"),
    [
        ([{"type": "image"}], {}, "0 under 'images'"),
        ([text("a")], {"images": [1]}, "1 images under 'images', 1 of them"),
        ([{"type": "video", "path": "a.mp4"}], {}, "video"),
        ([{"type": "image", "path": "none.png"}], {}, "the image none.png"),
        ([{"type": "image", "url": "https://example.org/a.png"}], {}, "https://example.org/a.png"),
        ([{"type": "image", "image": 7}], {}, "the image int"),
    ],
)
def test_what_is_no_image_is_an_error_that_names_row_and_message(
    tmp_path: Path, content: Any, entries: dict[str, Any], got: str
):
    module = SFTModule(make_image_model(), make_processor())
    with raises_at(DataError, "row 0 for supervised fine-tuning" + ("" if entries else ", message 0"), got):
        Trainer(HPS, tmp_path, verbose=False).fit(module, [say(content, "b", **entries)])


def test_images_need_a_processor_and_preferences_have_none():
    tokenizer, _ = split_processor(make_processor())
    row = say([picture(), text("a")], "b")
    with raises_at(
        DataError, "a row for supervised fine-tuning, message 0", "tokenizer", do="AutoModelForImageTextToText"
    ):
        mask_row(tokenizer, row)
    prefer = PreferenceModule(make_image_model(), tokenizer)
    pair = {"prompt": row["messages"][:1], "chosen": row["messages"][1:]}
    pair["rejected"] = [{"role": "assistant", "content": "c"}]
    with raises_at(DataError, "row 0 for preference tuning, message 0", "tokenizer"):
        prefer.make_samples([pair])[0]


def test_an_image_that_max_length_would_truncate_leaves_the_row_out():
    row = say([text("a"), picture(2)], "b")
    whole = masked(row)
    assert masked(row, max_length=whole.images.end).problems[0].kind == chat.NO_TARGET
    cut = masked(row, max_length=whole.images.end - 1)
    assert [problem.kind for problem in cut.problems] == [chat.CUT_IMAGE]
    assert not cut.has_target
    assert set(cut.sample()) == {"input_ids", "labels"}


def test_text_that_looks_like_an_image_leaves_the_row_out():
    found = masked(say("what is <|image_pad|>?", "b"))
    assert [problem.kind for problem in found.problems][0] == chat.REJECTED
    assert "1 times <|image_pad|>, for 0 images" in found.problems[0].detail


def test_a_processor_that_fails_or_rewrites_the_text_leaves_the_row_out():
    class Failing:
        image_token = "<|image_pad|>"
        tokenizer = make_processor().tokenizer

        def __call__(self, text: list[str], **_: Any) -> Any:
            if "fail" in text[0]:
                raise ValueError("no such image")
            return {"input_ids": torch.tensor([[1, 2, 3]])}

    for word, detail in (("fail", "ValueError: no such image"), ("a", "changes tokens beside those of the images")):
        row = say([picture(), text(word)], "b")
        found = mask_row(reader().tokenizer, row, images=ImageReader(Failing()))
        assert detail in found.problems[0].detail
    assert issubclass(ImageError, Exception)
    assert not issubclass(ImageError, AccmtError)


def test_one_yaml_trains_a_model_of_images_and_its_folder_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import (
        AutoModelForImageTextToText,
        AutoProcessor,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    from accmt.cli.main import main
    from tests.conversations import make_tokenizer

    monkeypatch.chdir(tmp_path)
    template = "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    template += "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n"
    template += "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer = make_tokenizer(template)
    tokenizer.chat_template = None
    images = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    processor = LlavaProcessor(
        images, tokenizer, 4, "default", template, image_token="<|image|>", num_additional_image_tokens=1
    )
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "clip_vision_model", **sizes, "image_size": 8, "patch_size": 4, "projection_dim": 8}
    text_config = {"model_type": "llama", "vocab_size": len(tokenizer), **sizes}
    config = LlavaConfig(
        vision_config=vision, text_config=text_config, image_token_index=tokenizer.convert_tokens_to_ids("<|image|>")
    )
    config.vision_feature_layer = -1
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained("base")
    processor.save_pretrained("base")
    draw_image(random.Random(1)).save("one.png")
    rows = [say([text("a"), {"type": "image", "path": "one.png"}], [text("b")]), say([text("c")], [text("d")])] * 4
    Path("train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("hps.yaml").write_text(
        "hps:\n  epochs: 1\n  batch_size: 4\n  optim: {type: SGD, lr: 0.1}\n  sft: train.jsonl\n"
        "  model: {path: ./base, type: AutoModelForImageTextToText}\n"
    )
    assert main(["data", "inspect", "hps.yaml"]) == 0
    assert main(["sft", "hps.yaml", "out", "--dataloader_num_workers=0"]) == 0
    loaded = AutoModelForImageTextToText.from_pretrained("out")
    before = AutoModelForImageTextToText.from_pretrained("base")
    moved = [not torch.equal(*pair) for pair in zip(loaded.parameters(), before.parameters(), strict=True)]
    assert sum(moved) > len(moved) // 2
    again = AutoProcessor.from_pretrained("out")
    assert again.apply_chat_template(rows[0]["messages"], tokenize=True) == processor.apply_chat_template(
        rows[0]["messages"], tokenize=True
    )


def test_tokens_around_one_image_are_followed_and_unclear_ones_are_not():
    assert _align([1, 9, 2], [1, 7, 9, 9, 8, 2], 9) == [0, None, None, None, None, 2]
    assert _align([1, 9, 2, 9, 3], [1, 9, 9, 2, 9, 3], 9) == [0, None, None, 2, None, 4]
    assert _align([1, 9, 2, 9, 3], [1, 7, 9, 2, 9, 3], 9) is None
    assert _align([1, 9, 2], [1, 9, 3], 9) is None
    assert _align([1, 9, 2], [1, 2], 9) is None


def test_generation_in_evaluations_rejects_images(tmp_path: Path):
    hps = {**HPS, "evaluation": {"generate": {"max_new_tokens": 2}}}
    module = SFTModule(make_image_model(), make_processor())
    with raises_at(AccmtError, "evaluation.generate"):
        Trainer(hps, tmp_path, verbose=False, metrics=["exact_match"]).fit(module, drawn(4), drawn(4))
