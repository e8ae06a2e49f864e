"""Conversations drawn from a seed, chat templates, and a tokenizer made of them."""

from __future__ import annotations

import random
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHATML = """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>
{% endif %}{{ message.content }}{% for call in message.tool_calls or [] -%}
<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
"""Like ChatML."""

LLAMA = """\
{{- bos_token -}}
{%- for message in messages -%}
<|header|>{{ message.role }}<|end_header|>

{% if message.reasoning_content %}{{ '[' + message.reasoning_content + ']' }}{% endif %}{{ message.content | trim }}
{%- for call in message.tool_calls or [] %}
{{ call.function.name }}({{ call.function.arguments | tojson }})
{%- endfor -%}
<|eot|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|header|>assistant<|end_header|>

{% endif -%}"""
"""Like Llama 3: it begins with a token of its own, and no line break follows the end of a turn."""

REWRITING = """\
{%- set last = namespace(user=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and loop.index0 > last.user -%}
<think>
{{ message.reasoning_content or '' }}
</think>

{% endif -%}
{{- message.content }}{% for call in message.tool_calls or [] -%}
<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
"""Removes the reasoning of earlier turns, as Qwen 3 does."""

TAG = re.compile(r"[ustar]\d{4,}x")
"""What stands in each text, by which it is found: of a user, system, tool result, assistant or its reasoning."""

_MARK = re.compile(r"<\|[^<>\s'\"{}]+\|>|<｜[^<>\s]+｜>|<[a-z_]+_of_[a-z]+>|</?think>|<\|[a-z_]+>|<[a-z_]+\|>")
"""What is a token of its own in templates."""

_WORDS = (  # noqa: SIM905 - a list of so many strings would be harder to read
    "the a of rain window price don't über naïve 東京 🙂🙃 e.g. 3.14 <b>bold</b> {json} \"quoted\" it's line\nbreak "
    "tab\there [INST] Q: A: end. Why? yes, no; # heading * item -- === $x_1$ http://a.b/c?d=e"
).split(" ")


def draw_conversations(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Draw conversations of several turns, with and without system prompt, tools and reasoning."""
    draw, count = random.Random(seed), iter(range(1000, 10**9))

    def text(kind: str) -> str:
        words = [draw.choice(_WORDS) for _ in range(draw.randrange(8))]
        words.insert(draw.randrange(len(words) + 1), f"{kind}{next(count)}x")
        return " ".join(words).strip()

    def answer(**entries: Any) -> dict[str, Any]:
        reasoning = {"reasoning_content": text("r")} if reasons else {}
        return {"role": "assistant", "content": text("a"), **reasoning, **entries}

    rows = []
    for _ in range(number):
        has_system, has_tools, reasons = (draw.random() < 0.4 for _ in range(3))
        messages = [{"role": "system", "content": text("s")}] if has_system else []
        for _ in range(draw.randrange(1, 5)):
            messages.append({"role": "user", "content": text("u")})
            for _ in range(draw.randrange(3) if has_tools else 0):
                function = {"name": "look_up", "arguments": {"what": f"a{next(count)}x"}}
                call = {"type": "function", "id": "abcdefghi", "function": function}
                messages.append(answer(tool_calls=[call], content=draw.choice(["", text("a")])))
                messages.append({"role": "tool", "name": "look_up", "tool_call_id": "abcdefghi", "content": text("t")})
            messages.append(answer())
        parameters = {"type": "object", "properties": {"what": {"type": "string"}}}
        schema = {"name": "look_up", "description": "Look it up.", "parameters": parameters}
        rows.append(
            {"messages": messages, **({"tools": [{"type": "function", "function": schema}]} if has_tools else {})}
        )
    return rows


def shipped_templates() -> dict[str, str]:
    """Return the chat templates that installed libraries ship: three of transformers, and those of TRL where it is."""
    from transformers.models.llama4.processing_llama4 import chat_template
    from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

    qwen: Any = Qwen2AudioProcessor.default_chat_template
    templates = {"smolvlm": DEFAULT_CHAT_TEMPLATE, "llama4": chat_template, "qwen2_audio": qwen.fget(None)}
    trl = find_spec("trl")
    for folder in trl.submodule_search_locations or () if trl else ():
        templates |= {
            f"trl:{path.stem}": path.read_text() for path in sorted(Path(folder).glob("chat_templates/*.jinja"))
        }
    return templates


@cache
def _train_merges() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = [message["content"] for row in draw_conversations(200, seed=1) for message in row["messages"]]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    return words.to_str()


def make_tokenizer(template: str | None = None, *, adds_bos: bool = False) -> Any:
    """Make a byte-level tokenizer with a chat template, whose markup is special tokens."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer.from_str(_train_merges())
    marks = sorted(set(_MARK.findall(template or "")) - {"<s>", "</s>"})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    if adds_bos:
        begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
        tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.chat_template = template
    return tokenizer


def in_parts(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose messages are lists of parts, as templates of models that see images want them."""
    messages = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in row["messages"]]
    return {**row, "messages": messages}


def trained_texts(tokenizer: Any, masked: Any) -> list[str]:
    """Return the text of each stretch of trained tokens."""
    texts, stretch = [], []
    for label in [*masked.labels, -100]:
        if label != -100:
            stretch.append(label)
        elif stretch:
            texts.append(tokenizer.decode(stretch))
            stretch = []
    return texts
