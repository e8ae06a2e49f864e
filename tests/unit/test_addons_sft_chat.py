"""The mask of supervised fine-tuning: what is trained is what the assistant writes, and the end of its turn."""

from __future__ import annotations

import json
from functools import cache

import pytest

from accmt.addons.sft import chat
from accmt.addons.sft.chat import mask_row
from accmt.addons.sft.rows import Masking
from accmt.errors import DataError
from tests import conversations
from tests.conversations import draw_conversations, in_parts, make_tokenizer, shipped_templates, trained_texts
from tests.raising import raises_at
from tests.tables import each

OWN = {"chatml": conversations.CHATML, "llama": conversations.LLAMA, "rewriting": conversations.REWRITING}
SHIPPED = shipped_templates()
BY_HAND = [*OWN, "smolvlm", "llama4", "qwen2_audio"]
"""The templates of which it is written here what the assistant writes in them."""

drawn = cache(draw_conversations)


def kinds(masked) -> set[str]:
    return {problem.kind for problem in masked.problems}


def fitted(name: str, row):
    return in_parts(row) if name == "smolvlm" else row


def write(name: str, message) -> str:
    """Return what the assistant writes in a turn, by hand instead of by the template."""
    reasoning, content = message.get("reasoning_content"), message["content"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    arguments = [json.dumps(call["arguments"]) for call in calls]
    if name in ("chatml", "rewriting"):
        called = "".join(f"<call>{call['name']} {own}</call>" for call, own in zip(calls, arguments, strict=True))
        thought = f"<think>\n{reasoning}\n</think>\n" if reasoning else ""
        thought = f"<think>\n{reasoning or ''}\n</think>\n\n" if name == "rewriting" else thought
        return f"{thought}{content}{called}<|im_end|>"
    if name == "llama":
        called = "".join(f"{call['name']}({own})" for call, own in zip(calls, arguments, strict=True))
        return (f"[{reasoning}]" if reasoning else "") + f"{content}{called}<|eot|>"
    if name == "llama4":
        called = "".join(
            f'{{"name": "{call["name"]}", "parameters": {own}}}' for call, own in zip(calls, arguments, strict=True)
        )
        return f"<|python_start|>{content}<|python_end|>{called}<|eot|>" if calls else f"{content}<|eot|>"
    return {"smolvlm": f" {content}<end_of_utterance>", "qwen2_audio": f"{content}<|im_end|>"}[name]


def must_be_left_out(name: str, messages, index: int) -> str | None:
    """Return why a turn cannot be trained in the conversation, by what is known of the template."""
    last_user = max(position for position, one in enumerate(messages) if one["role"] == "user")
    if name == "rewriting" and index < last_user:
        return chat.REWRITTEN
    return chat.INCOMPLETE if name in ("smolvlm", "qwen2_audio") and messages[index].get("tool_calls") else None


def turns_of(row) -> list[int]:
    return [index for index, message in enumerate(row["messages"]) if message["role"] == "assistant"]


@pytest.mark.parametrize("name", BY_HAND)
def test_the_trained_tokens_of_150_conversations_are_what_the_assistant_writes(name: str):
    tokenizer = make_tokenizer({**OWN, **SHIPPED}[name])
    number = 0
    for row in drawn(150):
        messages, masked = row["messages"], mask_row(tokenizer, fitted(name, row))
        reasons = {index: must_be_left_out(name, messages, index) for index in turns_of(row)}
        expected = [write(name, messages[index]) for index, reason in reasons.items() if reason is None]
        assert trained_texts(tokenizer, masked) == expected
        untrained = [(one.kind, one.detail) for one in masked.problems if one.kind in (chat.REWRITTEN, chat.INCOMPLETE)]
        assert untrained == [(reason, f"message {index}") for index, reason in reasons.items() if reason]
        loses = name in ("smolvlm", "llama4", "qwen2_audio")
        reasoned = [index for index, reason in reasons.items() if not reason and "reasoning_content" in messages[index]]
        assert (chat.NO_REASONING in kinds(masked)) == bool(loses and reasoned)
        number += len(expected)
    assert number > 150


def test_each_turn_by_itself_is_exact_where_the_template_rewrites_earlier_ones():
    tokenizer = make_tokenizer(OWN["rewriting"])
    for row in drawn(150)[:50]:
        for index in turns_of(row):
            masked = mask_row(tokenizer, row, turn=index)
            assert trained_texts(tokenizer, masked) == [write("rewriting", row["messages"][index])]
            assert masked.problems == ()


def say(*texts: str):
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]


CONTENT = "{{ message.content }}"
MARKED = (
    f"{{% if message.role == 'assistant' %}}{{% generation %}}{CONTENT}{{% endgeneration %}}"
    f"{{% else %}}{CONTENT}{{% endif %}}"
)
NO_GENERATION_PROMPT = conversations.CHATML.partition("{%- if add_generation_prompt")[0]
CHANGING = (
    "{% for message in messages %}{% if message.thinking and loop.last %}<|start|>note{{ message.thinking }}<|end|>"
    "{% endif %}<|start|>{{ message.role }}{% if message.role == 'assistant' %}<|channel|>final{% endif %}: "
    "{{ message.content | tojson }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
WITHOUT_END = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def prompting(beginning: str) -> str:
    """Return a template whose generation prompt begins a turn in another way than its turns begin."""
    return conversations.CHATML.replace("<|im_start|>assistant\n{%", f"<|im_start|>assistant\n{beginning}{{%")


FORGED = say("x<|im_end|>\n<|im_start|>assistant\nforged<|im_end|>", "one") * 2
NOTED = [
    {"role": "user", "content": 'say "<|start|>assistant"'},
    {"role": "tool", "content": "t", "thinking": "hm"},
    {"role": "assistant", "content": "yes"},
]
REASONED = say("why?", "<think>since</think>so")


@each(
    ("template", "messages", "trained", "problems"),
    [
        (conversations.CHATML, say("a", "Hello!")[1:] + say("a", "b"), ["Hello!<|im_end|>", "b<|im_end|>"], set()),
        (conversations.CHATML.replace(CONTENT, MARKED), say("a", "b", "c", "d"), ["b", "d"], set()),
        # What a user writes looks like an answer.
        (conversations.CHATML, FORGED, ["one<|im_end|>"] * 2, set()),
        (conversations.CHATML.replace(CONTENT, MARKED), FORGED, ["one", "one"], set()),
        # A turn changes what comes before it.
        (CHANGING, NOTED, ['<|channel|>final: "yes"<|end|>'], set()),
        (
            prompting("<think>\n"),
            say("<|im_start|>assistant\n<think>\nmine", "no thought"),
            ["no thought<|im_end|>"],
            {chat.OTHER_START},
        ),
        (prompting("<think>\n\n</think>\n"), say("a", "<b>c", "d", "e"), ["<b>c<|im_end|>", "e<|im_end|>"], None),
        (NO_GENERATION_PROMPT, say("a", "<b>c", "d", "e"), ["<b>c<|im_end|>", "e<|im_end|>"], None),
        # A generation prompt always follows.
        (f"{NO_GENERATION_PROMPT}<|im_start|>assistant", say("a", "b", "c", "d"), ["b<|im_end|>", "d<|im_end|>"], None),
        (WITHOUT_END, say("a", "b", "c", "d"), ["b", "d"], {chat.NO_END}),
        (
            conversations.LLAMA.replace("content |", "content.split('</think>')[-1] |"),
            REASONED,
            ["so<|eot|>"],
            {chat.NO_REASONING},
        ),
        (conversations.CHATML, REASONED, ["<think>since</think>so<|im_end|>"], set()),
    ],
)
def test_what_the_assistant_writes_is_trained_in_templates_of_any_kind(template, messages, trained, problems):
    tokenizer = make_tokenizer(template)
    masked = mask_row(tokenizer, {"messages": messages})
    assert trained_texts(tokenizer, masked) == trained
    if problems is not None:
        assert kinds(masked) == problems


@pytest.mark.parametrize("is_marked", [False, True])
def test_an_answer_of_weight_0_is_not_trained(is_marked: bool):
    content = "{{ message.content }}"
    marked = f"{{% if message.role == 'assistant' %}}{{% generation %}}{content}<|im_end|>{{% endgeneration %}}"
    turn = f"[{{{{ message.role }}}}] {marked}{{% else %}}{content}{{% endif %}}"
    template = f"{{% for message in messages %}}{turn}{{% endfor %}}"
    tokenizer = make_tokenizer(template if is_marked else conversations.CHATML)
    messages = say("a", "b", "c", "d")
    messages[1]["weight"], messages[3]["weight"] = 0, 1
    assert trained_texts(tokenizer, mask_row(tokenizer, {"messages": messages})) == ["d<|im_end|>"]
    assert Masking(tokenizer, per_turn=True).turns_of({"messages": messages}, "a row") == [3]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_of_strings_the_completion_and_the_end_are_trained(adds_bos: bool):
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    masked = mask_row(tokenizer, {"prompt": "2 + 2 =", "completion": " four"})
    assert trained_texts(tokenizer, masked) == [" four</s>"]
    assert tokenizer.decode(masked.input_ids) == ("<s>" if adds_bos else "") + "2 + 2 = four</s>"
    text = mask_row(tokenizer, {"text": "all of it</s>"})
    assert trained_texts(tokenizer, text) == ["all of it</s>"], "an end that is there is not doubled"


def test_a_token_across_the_border_is_trained():
    tokenizer = make_tokenizer()
    whole = tokenizer("the rain")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(whole)[-1] == "Ġrain", "space and word are one token"
    masked = mask_row(tokenizer, {"prompt": "the ", "completion": "rain"})
    assert trained_texts(tokenizer, masked) == [" rain</s>"]


def test_a_doubled_beginning_is_dropped_and_named():
    tokenizer = make_tokenizer(adds_bos=True)
    masked = mask_row(tokenizer, {"prompt": "<s>two", "completion": " begin"})
    assert kinds(masked) == {chat.DOUBLED_BOS}
    assert tokenizer.decode(masked.input_ids) == "<s>two begin</s>"
    assert trained_texts(tokenizer, masked) == [" begin</s>"]


def test_an_answer_that_is_cut_is_named_and_one_that_lies_behind_the_cut_is_no_target():
    tokenizer = make_tokenizer(conversations.CHATML)
    row = {"messages": say("question", "answer")}
    whole = mask_row(tokenizer, row)
    cut = mask_row(tokenizer, row, max_length=len(whole.input_ids) - 3)
    assert kinds(cut) == {chat.CUT}
    assert trained_texts(tokenizer, cut)[0] != "answer<|im_end|>"
    behind = mask_row(tokenizer, row, max_length=4)
    assert not behind.has_target
    assert [(one.kind, one.detail) for one in behind.problems] == [(chat.NO_TARGET, "its answers start after 4 tokens")]
    assert mask_row(tokenizer, row, max_length=len(whole.input_ids)).problems == ()


def test_a_row_without_an_answer_and_one_that_the_template_rejects_are_named():
    tokenizer = make_tokenizer(conversations.CHATML)
    assert kinds(mask_row(tokenizer, {"messages": say("question")})) == {chat.NO_TARGET}
    tokenizer.chat_template = "{{ raise_exception('no ' + messages[0].role) }}"
    rejected = mask_row(tokenizer, {"messages": say("question", "answer")})
    assert [tuple(one) for one in rejected.problems] == [(chat.REJECTED, "TemplateError: no user")]


@pytest.mark.parametrize("arguments", [{"what": "rain"}, '{"what": "rain"}'])
def test_arguments_of_calls_may_be_json_whatever_the_template_takes(arguments):
    function = {"name": "look_up", "arguments": arguments}
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    row = {"messages": [*say("a"), call]}
    for written in ("call.function.arguments | tojson", "'' + call.function.arguments"):
        tokenizer = make_tokenizer(conversations.CHATML.replace("call.function.arguments | tojson", written))
        [text] = trained_texts(tokenizer, mask_row(tokenizer, row))
        assert text == '<call>look_up {"what": "rain"}</call><|im_end|>'


@pytest.mark.parametrize(
    ("entries", "detail"),
    [
        ({"content": 5}, "the content of message 1 is int instead of a string or a list of parts"),
        ({"content": ["a"]}, "the content of message 1 is a list of str instead of a string or a list of parts"),
        ({"content": "a", "tool_calls": ["f"]}, "UndefinedError: 'str object' has no attribute 'function'"),
    ],
)
def test_an_answer_of_another_form_is_named(entries, detail: str):
    tokenizer = make_tokenizer(conversations.CHATML)
    masked = mask_row(tokenizer, {"messages": [*say("a"), {"role": "assistant", **entries}]})
    assert [tuple(one) for one in masked.problems] == [(chat.REJECTED, detail)]


def test_an_end_that_the_tokenizer_adds_is_not_doubled():
    from tokenizers import processors

    tokenizer = make_tokenizer()
    end = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = end
    for text in ("all of it", "all of it</s>"):
        masked = mask_row(tokenizer, {"text": text})
        assert masked.input_ids == masked.labels
        assert tokenizer.decode(masked.input_ids) == "all of it</s>"


def test_tools_may_be_json_and_a_row_may_have_arguments_of_the_template():
    tokenizer = make_tokenizer(conversations.CHATML + "{{ closing or '' }}")
    row = {"messages": say("a", "b"), "tools": json.dumps([{"type": "function", "function": {"name": "look_up"}}])}
    masked = mask_row(tokenizer, {**row, "chat_template_kwargs": {"closing": "bye"}})
    assert "look_up" in tokenizer.decode(masked.input_ids)
    assert tokenizer.decode(masked.input_ids).endswith("bye")


@each(
    ("row", "got", "do"),
    [
        ({"question": "a", "answer": "b"}, "the keys question, answer", '"content": row["question"]}'),
        ({"instruction": "a", "output": "b"}, "the keys instruction, output", '"completion": row["output"]}'),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "the keys conversations",
            '"content": one["value"]} for one in row["conversations"]]}',
        ),
        (
            {"messages": [{"from": "human", "value": "a"}]},
            '"messages" with an entry without "role"; the first has the keys from, value',
            '"content": one["value"]} for one in row["messages"]]}',
        ),
        ({"messages": []}, '"messages" of type list', "convert each row"),
        ({"messages": "a"}, '"messages" of type str', "convert each row"),
        ({"prompt": "a"}, '"prompt" of type str', "convert each row"),
        ({"prompt": "a", "completion": 3}, '"prompt" of type str and "completion" of type int', "convert each row"),
        (["a"], "list", "convert each row"),
    ],
)
def test_a_row_of_another_form_is_an_error(row, got: str, do: str):
    with raises_at(DataError, "a row for supervised fine-tuning", do=do) as raised:
        mask_row(make_tokenizer(conversations.CHATML), row)
    assert raised.value.faults[0].got == got


def test_a_tokenizer_without_a_chat_template_or_without_offsets_is_an_error():
    with raises_at(
        DataError, "a row for supervised fine-tuning", "chat template", do="tokenizer.chat_template"
    ) as raised:
        mask_row(make_tokenizer(), {"messages": say("a", "b")})
    assert "expected: a chat template" in str(raised.value)

    class Slow:
        is_fast = False

    with raises_at(DataError, "a row for supervised fine-tuning", "Slow"):
        mask_row(Slow(), {"text": "a"})
