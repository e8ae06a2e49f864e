"""Conversations with images, and a tiny model of images and text whose processor is made here."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np

from tests.conversations import draw_conversations, make_tokenizer

TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
"""Like that of Qwen2-VL."""


@cache
def make_processor() -> Any:
    """Make a processor of Qwen2-VL with a tokenizer of tests, for small images."""
    from transformers import Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class Processor(Qwen2VLProcessor):
        """Without videos, whose processor needs torchvision."""

        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
            super().__init__(image_processor, tokenizer, None, chat_template=chat_template)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    tokenizer = make_tokenizer(TEMPLATE + "<|video_pad|>")
    tokenizer.chat_template = None
    images = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=1024)
    return Processor(images, tokenizer, TEMPLATE)


def draw_image(draw: random.Random) -> Any:
    """Draw an image of some size."""
    from PIL import Image

    shape = draw.randrange(9, 40), draw.randrange(9, 40), 3
    pixels = np.random.default_rng(draw.randrange(10**6)).integers(0, 255, shape, np.uint8)
    return Image.fromarray(pixels)


def draw_picture_conversations(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Draw conversations of parts; two in three have images, in any turns of the user."""
    draw, rows = random.Random(seed), []
    for row in draw_conversations(number, seed=seed):
        messages = []
        for one in row["messages"]:
            if one["role"] == "tool" or "tool_calls" in one:
                continue
            parts = [{"type": "text", "text": one["content"]}]
            if one["role"] == "user" and draw.random() < 0.4:
                for _ in range(draw.randrange(1, 3)):
                    parts.insert(draw.randrange(len(parts) + 1), {"type": "image", "image": draw_image(draw)})
            messages.append({"role": one["role"], "content": parts})
        rows.append({"messages": messages})
    return rows


def make_image_model() -> Any:
    """Make a tiny Qwen2-VL with random weights."""
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    tokenizer = make_processor().tokenizer
    ids = dict(
        zip(
            ("vision_start", "vision_end", "image", "video"),
            tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]),
            strict=True,
        )
    )
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": len(tokenizer), "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    torch.manual_seed(0)
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config=text, vision_config=vision, **{f"{name}_token_id": one for name, one in ids.items()})
    )


def plain_gradient(rows: list[dict[str, Any]]) -> Any:
    """Return the gradient of the mean loss over all targets, with one call of the model for each row."""
    import torch
    from torch.nn import functional

    from accmt.addons.sft.chat import mask_row
    from accmt.addons.sft.images import split_processor

    tokenizer, images = split_processor(make_processor())
    model, lost, total = make_image_model().double(), torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        inputs = make_processor().apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_tensors="pt"
        )
        labels = torch.tensor(mask_row(tokenizer, row, images=images).labels)[1:]
        logits = model(**inputs).logits[0, :-1]
        lost = lost + functional.cross_entropy(logits, labels, reduction="sum")
        total += int((labels != -100).sum())
    (lost / total).backward()
    gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients])


def gradient_of_step(folder: Any, rows: list[dict[str, Any]], parts: int, *, accumulation: int, **hps: Any) -> Any:
    """Return the gradient of one step over all rows in parts, from the change that SGD makes."""
    import torch

    from accmt import SFTModule, Trainer
    from accmt.sharded_tensors import make_whole

    module = SFTModule(make_image_model().double(), make_processor())
    before = torch.cat([weight.detach().flatten().clone() for weight in module.model.parameters()])
    trainer = Trainer(
        {"epochs": 1, "batch_size": len(rows) // parts, "optim": {"type": "SGD", "lr": 1.0}, **hps},
        folder,
        seed=1,
        verbose=False,
        shuffle_train=False,
        dataloader_num_workers=0,
        grad_accumulation_steps=accumulation,
    )
    trainer.fit(module, rows)
    assert trainer.state.global_step == 1
    assert trainer.state.samples_seen == len(rows)
    after = [make_whole(weight).detach().flatten() for weight in module.unwrapped_model.parameters()]
    return before - torch.cat(after)
