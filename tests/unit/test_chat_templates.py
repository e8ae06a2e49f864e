"""The mask in every chat template that installed libraries ship: what is trained is read off the rendered text by hand.

`make chat-templates` runs it with the templates of TRL, `make test` with those of the libraries in .venv.
"""

from __future__ import annotations

import json
import os
import re
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import pytest

from accmt.addons.sft import chat
from accmt.addons.sft.chat import mask_row
from tests.conversations import TAG, draw_conversations, in_parts, make_tokenizer, shipped_templates, trained_texts

SHIPPED = shipped_templates()
NUMBER = int(os.environ.get("CONVERSATIONS", "40"))
"""How many of the 500 conversations; each costs some 10 ms for each template."""

drawn = cache(draw_conversations)


class Grammar(NamedTuple):
    """What stands around the turns of the assistant, as one reads it in a rendered conversation.

    Attributes:
        header: Begins a turn; the first that matches behind the header is the rest of the generation prompt.
        end: Ends it, as a regular expression.
        prompts: What the generation prompt may have behind the header, as regular expressions.
    """

    header: str
    end: str
    prompts: str = ""


CHATML = Grammar(r"<\|im_start\|>assistant\n", r"<\|im_end\|>")
GEMMA = Grammar(r"<tool_response\|>(?:<\|turn>model\n)?|<\|turn>model\n", r"<turn\|>|<tool_call\|><\|tool_response>")
GRAMMARS = {
    "cohere": Grammar(r"<\|START_OF_TURN_TOKEN\|><\|CHATBOT_TOKEN\|>", r"<\|END_OF_TURN_TOKEN\|>"),
    "cohere2": Grammar(r"<\|START_OF_TURN_TOKEN\|><\|CHATBOT_TOKEN\|><\|START_RESPONSE\|>", r"<\|END_OF_TURN_TOKEN\|>"),
    "deepseek": Grammar("<｜Assistant｜>|<｜tool▁outputs▁end｜>|(?=\n<｜tool▁call▁begin｜>)", "<｜end▁of▁sentence｜>"),
    "gemma": Grammar(r"<start_of_turn>model\n", "<end_of_turn>"),
    "gemma4": Grammar(
        r"<tool_response\|>(?:<\|turn>model\n)?|<\|turn>model\n", r"<turn\|>|<tool_call\|><\|tool_response>"
    ),
    "diffusion_gemma": Grammar(
        r"<tool_response\|>(?:<\|turn>model\n)?|<\|turn>model\n", r"<turn\|>|<tool_call\|><\|tool_response>"
    ),
    "glm4moe": Grammar(r"<\|assistant\|>", r"(?=<\|user\|>|<\|observation\|>|<\|system\|>|$)"),
    "gptoss": Grammar(r"<\|start\|>assistant", r"(?=<\|start\|>user|<\|start\|>functions|$)"),
    "muse": Grammar(r"<\|start\|>assistant", r"(?=<\|start\|>user|<\|start\|>tool|$)"),
    "idefics3": Grammar("Assistant:", "<end_of_utterance>"),
    "smolvlm": Grammar("Assistant:", "<end_of_utterance>"),
    "lfm2": CHATML,
    "llama3": Grammar(r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n", r"<\|eot_id\|>"),
    "llama4": Grammar(r"<\|header_start\|>assistant<\|header_end\|>\n\n", r"<\|eot\|>"),
    "llava_next": Grammar(r"\[/INST\]", "</s>"),
    "nemotron": Grammar(CHATML.header, CHATML.end, r"<think>\n|<think></think>"),
    "phi3": Grammar(r"<\|assistant\|>\n", r"<\|end\|>(?:\n</s>$)?"),
    "qwen": CHATML,
    "qwen3_5_think": Grammar(CHATML.header, CHATML.end, r"<think>\n"),
    "qwen3_5_nothink": Grammar(CHATML.header, CHATML.end, r"<think>\n(?:\n</think>\n\n)?"),
    "qwen3_6": Grammar(CHATML.header, CHATML.end, r"<think>\n"),
    "qwen3_8": Grammar(CHATML.header, CHATML.end, r"<think>\n"),
}
"""By what a template's name begins with; the longest counts."""


def grammar_of(name: str) -> Grammar:
    bare = name.removeprefix("trl:")
    return GRAMMARS[max((begin for begin in GRAMMARS if bare.startswith(begin)), key=len)]


def read_turns(grammar: Grammar, text: str) -> list[tuple[int, int]]:
    pattern = rf"(?:{grammar.header})(?:{grammar.prompts})?(?P<turn>.*?(?:{grammar.end}))"
    return [found.span("turn") for found in re.finditer(pattern, text, re.DOTALL)]


def fit(name: str, row: Any) -> Any:
    """Return a row in the form that a template takes."""
    if any(kind in name for kind in ("smolvlm", "llava", "idefics")):
        return in_parts(row)
    if "gemma4" in name or "diffusion" in name:  # they write the content behind the results of the calls
        messages = [{**one, "content": ""} if "tool_calls" in one else one for one in row["messages"]]
        return {**row, "messages": messages}
    if "deepseek" in name and not name.endswith("_training"):  # they join the arguments of calls to text
        row = deepcopy(row)
        calls = [call["function"] for one in row["messages"] for call in one.get("tool_calls", ())]
        for call in calls:
            call["arguments"] = json.dumps(call["arguments"])
    return row


class Expected(NamedTuple):
    """The text of a conversation, where in it the turns lie that are trained, and why others are not."""

    whole: str
    turns: list[tuple[int, int]]
    untrained: list[tuple[str, str]]


def expected_of(name: str, tokenizer: Any, row: Any) -> Expected | None:
    """Return what is expected of a row; None if the template rejects it."""
    grammar, messages = grammar_of(name), row["messages"]
    indices = [index for index, one in enumerate(messages) if one["role"] == "assistant"]

    def render(number: int) -> str:
        return tokenizer.apply_chat_template(messages[:number], tools=row.get("tools"), tokenize=False)

    try:
        whole = render(len(messages))
        throughs = [render(index + 1) for index in indices]
    except Exception:  # noqa: BLE001 - a template raises what it likes
        return None
    turns, reasons = [], []
    for index, through in zip(indices, throughs, strict=True):
        [*_, (start, end)] = read_turns(grammar, through)
        said = TAG.findall(json.dumps([messages[index]["content"], messages[index].get("tool_calls")]))
        kept = end - len(re.search(r"(\n</s>)?$", through[:end])[0])  # the mark of the end of a conversation
        if not whole.startswith(through[:kept]):
            reasons.append((chat.REWRITTEN, f"message {index}"))
        elif not set(said) <= set(TAG.findall(through[start:end])):
            reasons.append((chat.INCOMPLETE, f"message {index}"))
        else:
            turns.append((start, end if whole.startswith(through[:end]) else kept))
    return Expected(whole, turns, reasons)


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_trained_of_conversations_is_what_stands_between_header_and_end(name: str) -> None:
    tokenizer = make_tokenizer(SHIPPED[name])
    has_markers = "{%- generation" in SHIPPED[name] or "{% generation" in SHIPPED[name]
    number = 0
    for row in drawn(500)[:NUMBER]:
        own = fit(name, row)
        expected, masked = expected_of(name, tokenizer, own), mask_row(tokenizer, own)
        if expected is None:
            assert [one.kind for one in masked.problems] == [chat.REJECTED]
            continue
        untrained = [tuple(one) for one in masked.problems if one.kind in (chat.REWRITTEN, chat.INCOMPLETE)]
        assert untrained == expected.untrained
        found, texts = trained_texts(tokenizer, masked), [expected.whole[start:end] for start, end in expected.turns]
        if has_markers:
            assert len(found) == len(texts)
            found = [without_more(expected.whole, turn, text) for turn, text in zip(expected.turns, found, strict=True)]
        assert found == texts
        number += len(texts)
    assert number > NUMBER / 2


def without_more(whole: str, turn: tuple[int, int], text: str) -> str:
    """Return a trained text without the header before it and the line break behind it, which TRL's markers may hold."""
    start, end = turn
    expected = whole[start:end]
    expected = expected if expected in text else expected.removesuffix("<|tool_response>")  # it is the template's end
    before, _, behind = text.partition(expected)
    is_header = whole.endswith(before, 0, start) and TAG.search(before) is None
    is_more = whole.startswith(behind, end) and re.fullmatch(r"\s*(<\|user\|>|<\|observation\|>)?\s*|</s>", behind)
    return whole[start:end] if is_header and is_more else text
