"""Conversations and pairs: each layout gives the same messages, and nothing is left out without a word."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data.data.datasets import ChatDataset, PreferenceDataset
from libai_data.data.text.tokenizer import TextTokenizer
from libai_data.errors import FormatError
from tests.data.datasets.chats import CHATML, TEMPLATES, arrays, check_alike, conversation, learned

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


def test_alpacas_history_and_a_system_text_are_what_messages_of_the_same_words_are(tokenizer: TextTokenizer) -> None:
    written = conversation("a", "b", "c", "d", "add\n\n1", "e", system="be kind")
    alpaca = {"instruction": "add", "input": "1", "output": "e", "history": [["a", "b"], ("c", "d")]}
    roles = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": roles[each["role"]], "value": each["content"]} for each in written["messages"]]
    same = [
        written,
        {"conversations": turns},
        {**written, "prompt": "a", "conversation_id": 3, "conversations": turns, "rejected": "z"},
        {**written, "system": "be kind"},
        {**conversation("a", "b", "c", "d", "add\n\n1", "e"), "system": "be kind"},
        {**alpaca, "system": "be kind"},
        {**alpaca, "system": "be kind", "history": np.array(alpaca["history"], object)},
    ]
    none = [conversation("add\n\n1", "e"), {**alpaca, "history": []}, {**alpaca, "history": None, "system": ""}]
    for items in (same, none):
        check_alike(ChatDataset(items, tokenizer, 256))
    tools = [{"name": "f"}]
    with_tools = [{**conversation("a", "b"), "tools": tools}, {"instruction": "a", "output": "b", "tools": tools}]
    check_alike(ChatDataset(with_tools, tokenizer, 256, chat_template=TEMPLATES["headers"]))


def test_a_system_text_is_before_both_answers_of_a_pair(tokenizer: TextTokenizer) -> None:
    texts = {"prompt": "a", "chosen": "b", "rejected": "c"}
    whole = {name: conversation("a", texts[name], system="s")["messages"] for name in ("chosen", "rejected")}
    prompt = whole["chosen"][:-1]
    pairs = [whole, {**whole, "system": "s"}, {**texts, "system": "s"}, {**whole, "prompt": "a"}]
    check_alike(PreferenceDataset([*pairs, {**texts, "prompt": prompt}], tokenizer, 64))


USER, GOOD, BAD = ({"role": role, "content": text} for role, text in (("user", "p"), *[("assistant", t) for t in "xy"]))
SHAREGPT = [{"from": "human", "value": "p"}]


@pytest.mark.parametrize(
    "item",
    [
        {"prompt": "p", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "p", "chosen": [USER, GOOD], "rejected": "y"},
        {"prompt": "p", "chosen": "x", "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": GOOD, "rejected": [BAD]},
        {"messages": [USER], "chosen": "x", "rejected": [USER, BAD]},
        {"messages": [USER], "chosen": GOOD, "rejected": BAD},
        {"instruction": "p", "input": "", "chosen": "x", "rejected": "y", "prompt_id": "7", "system": ""},
        {"conversations": SHAREGPT, "chosen": {"from": "gpt", "value": "x"}, "rejected": {"from": "gpt", "value": "y"}},
        # As UltraFeedback: the preferred conversation is there twice.
        {"prompt": "p", "messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD], "score_chosen": 9},
        {"messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": np.array([USER, BAD], object)},
    ],
)
def test_each_layout_of_a_pair_has_the_prompt_once(tokenizer: TextTokenizer, item: dict[str, Any]) -> None:
    check_alike(PreferenceDataset([{"prompt": "p", "chosen": "x", "rejected": "y"}, item], tokenizer, 64))


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are the same"),
        ({"question": "a", "chosen": "b", "rejected": "c"}, "'rejected'\\]; a pair of texts needs the text"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "history": [["d", "e"]]}, "its 'history' is not used"),
        ({"prompt": "a", "chosen": "b", "rejected": []}, "its messages are \\[\\]"),
        ({"prompt": "a", "choosen": "b", "rejected": "c"}, "'chosen' and 'rejected'. Did you mean 'chosen'"),
        ({"prompt": "a", "messages": [USER], "chosen": "b", "rejected": "c"}, "its 'messages' is not used"),
        ({"prompt": "a", "instruction": "d", "chosen": "b", "rejected": "c"}, "its 'instruction' is not used"),
        ({"prompt": "a", "chosen": [USER, GOOD], "rejected": "c"}, "'chosen' begins with a message of the role 'user'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "Tool": [{"name": "f"}]}, "Did you mean 'tools'"),
        (
            {"prompt": "a", "chosen": None, "rejected": "b"},
            r"from number 1 on counts in the loss: their roles are \[\]",
        ),
    ],
)
def test_what_is_no_pair_is_refused(tokenizer: TextTokenizer, item: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        PreferenceDataset([item], tokenizer, 64, chat_template=TEMPLATES["instructions"])[0]


def said(message: dict[str, Any]) -> dict[str, Any]:
    """A conversation with a message of the assistant that no template can write."""
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", **message}]}


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({**conversation("a", "b"), "instruction": "c"}, r"its 'instruction' is not used, .* in \['messages'\]"),
        ({**conversation("a", "b"), "history": [["c", "d"]]}, "its 'history' is not used"),
        ({**conversation("a", "b"), "system_prompt": "c"}, "its 'system_prompt' is not used"),
        ({**conversation("a", "b"), "sytem": "c"}, "its 'sytem' is not used.* Did you mean 'system'"),
        ({**conversation("a", "b"), "conversations": [{"from": "human", "value": "c"}]}, "'conversations' is not used"),
        ({"instruction": "a", "output": "b", "prompt": "c"}, "its 'prompt' is not used"),
        ({"input": "a", "output": "b"}, r"has the fields \['input', 'output'\]; a conversation has"),
        ({"conversation": []}, "Did you mean 'conversations'"),
        ({"conversations": [{"from": "function_call", "value": "a"}]}, "message 0 is from 'function_call'"),
        (said({"content": "a", "weights": 0}), "message 1 has 'weights', .* Did you mean 'weight'"),
        (said({"content": "a", "tool_call": [{"name": "f"}]}), "message 1 has 'tool_call', .*'tool_calls'"),
        (said({"content": "a", "reasoning_content": "c"}), "message 1 has reasoning_content, but the chat template"),
        ({"text": "a"}, r"has the fields \['text'\]; a conversation has 'messages'"),
        ({"instruction": "a", "output": None}, "its 'output' is None"),
        ({"instruction": "a", "input": 3, "output": "b"}, "its 'input' is 3; it must be a text"),
        ({"instruction": "a", "output": "b", "history": [["a", "b", "c"]]}, r"'history' has \['a', 'b', 'c'\]"),
        ({"instruction": "a", "output": "b", "history": "a"}, "'history' has 'a'; it must be a list of pairs"),
        ({**conversation("a", "b"), "system": 3}, "its 'system' is 3; it must be a text"),
        ({**conversation("a", "b", system="s"), "system": "t"}, "its 'system' is not the system message"),
        ({"messages": []}, "must be a list of one or more"),
        ({"messages": ["hello"]}, "message 0 is 'hello'"),
        ({"messages": [{"role": "user", "content": "a"}]}, r"counts in the loss: their roles are \['user'\]"),
        (said({"content": "a", "weight": 2}), "message 1 has the weight 2; it must be 0 or 1"),
        (said({"content": "a", "weight": np.array([0, 1])}), r"message 1 has the weight .*\[0, 1\]"),
        (conversation("a", "b", system="s"), "only user and assistant"),
        (said({"text": "b"}), r"message 1 has the fields \['role', 'text'\]; it must have a 'content'"),
        (said({"tool_calls": []}), "message 1 has the fields .* or 'tool_calls'"),
        ({"messages": [{"role": "user"}, *said({"content": "b"})["messages"]]}, "message 0 has the fields"),
        (said({"content": 3}), "message 1 has the content 3; it must be a text"),
        (said({"content": [{"type": "image", "url": "a"}]}), "message 1 has the content .*image"),
        (said({"content": "\ud800"}), "not Unicode text"),
        (said({"content": None, "tool_calls": [{"name": "f"}]}), "message 1 has tool_calls, but the chat template"),
        ({**conversation("a", "b"), "tools": "f"}, "tools are 'f'"),
        ({**conversation("a", "b"), "tools": [{"name": "f"}]}, "there are tools, but"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_index(
    tokenizer: TextTokenizer, item: dict[str, Any], words: str
) -> None:
    dataset = ChatDataset([conversation("a", "b"), item], tokenizer, 64, chat_template=TEMPLATES["instructions"])
    with pytest.raises(FormatError, match=words) as told:
        dataset[1]
    assert "conversation 1: " in str(told.value)
    assert ChatDataset([{**conversation("a", "b"), "tools": []}], tokenizer, 64)[0] is not None


def test_messages_may_be_parts_of_text_nothing_and_arrays_of_a_table(folder: Path, tokenizer: TextTokenizer) -> None:
    messages = conversation("one", "two words", system="")["messages"]
    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "words"}]
    same = [
        messages,
        tuple(messages),
        np.array(messages, object),
        [{"role": "user", "content": ["o", "ne"]}, {"role": "assistant", "content": np.array(parts, object)}],
    ]
    check_alike(ChatDataset([{"messages": each} for each in same], tokenizer, 64))
    # No content is nothing, and not the word None.
    silent = [*messages, {"role": "user", "content": None}, {"role": "assistant", "content": None}]
    assert (
        learned(arrays(ChatDataset([{"messages": silent}], tokenizer, 64)[0]), folder)
        == "two words<|im_end|><|im_end|>"
    )
    # Nor has a message that calls tools to say anything.
    template = CHATML.replace("{{ message['content'] }}", "{{ message['content'] }}{{ message.tool_calls }}")
    calling = [messages[0], {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    dataset = ChatDataset([{"messages": calling}], tokenizer, 64, chat_template=template)
    assert learned(arrays(dataset[0]), folder) == "[{'name': 'f'}]<|im_end|>"


CALLS = CHATML.replace(
    "{{ message['content'] }}",
    "{{ message['content'] }}{% for call in message.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}",
)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (3, "the tool_calls 3; they must be a list of calls"),
        ([3], r"the tool_calls \[3\]"),
        (np.arange(2), r"the tool_calls \[0, 1\]"),
        ({"name": "f"}, "the tool_calls {'name': 'f'}"),
        ([{"function": "f"}], "the tool_calls .*'function': 'f'"),
        ([{"function": {"name": 3}}], "the tool_calls"),
        ([{"name": "f", "arguments": {}}], "the chat template fails: UndefinedError: .*'function'"),
        ([{"function": {"name": "f", "arguments": {1, 2}}}], "the chat template fails: TypeError"),
    ],
)
def test_tool_calls_that_are_none_are_refused_with_the_message(
    tokenizer: TextTokenizer, calls: Any, words: str
) -> None:
    item = {"messages": [*said({"content": "b", "tool_calls": calls})["messages"], *conversation("c", "d")["messages"]]}
    dataset = ChatDataset([item], tokenizer, 64, chat_template=CALLS)
    with pytest.raises(FormatError, match=f"conversation 0: message 1.*{words}"):
        dataset[0]


def test_tool_calls_of_a_table_are_those_of_json_and_an_error_names_the_file(
    tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    plain = [{"function": {"name": "f", "arguments": {"a": [1, 2]}}}]
    of_table = np.array([{"function": {"name": "f", "arguments": {"a": np.array([1, 2])}}}], object)
    items = [said({"content": None, "tool_calls": calls}) for calls in (plain, of_table)]
    check_alike(ChatDataset(items, tokenizer, 64, chat_template=CALLS))
    (tmp_path / "a.jsonl").write_text(json.dumps(items[0]) + "\n")
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in (items[0], said({"tool_calls": [3]})))
    )
    dataset = ChatDataset(str(tmp_path), tokenizer, 64, chat_template=CALLS)
    with pytest.raises(
        FormatError, match=r"conversation 2 \(.*b\.jsonl, record 1\): message 1 has the tool_calls \[3\]"
    ):
        dataset[2]


ODD: list[Any] = [None, 3, "", "x", [], {}, [[]], [None], float("nan"), 10**30, b"a", {1: 2}, [1, "a", {}]]
ODD += [np.arange(3), np.array(3), np.float32(1), np.array([], object), [{"role": "user", "content": "q"}]]
F = {"name": "f", "arguments": {"a": [1]}}
WHOLE: list[tuple[Any, dict[str, Any]]] = [
    (ChatDataset, {**said({"content": "b", "weight": 1, "tool_calls": [{"function": F}]}), "system": "s"}),
    (ChatDataset, {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]], "tools": None}),
    (ChatDataset, {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}),
    (PreferenceDataset, {"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}], "rejected": "c"}),
    (PreferenceDataset, {"messages": [USER], "chosen": GOOD, "rejected": [USER, BAD]}),
]


def changed(value: Any, odd: Any) -> Iterator[Any]:
    """A value with one part of it replaced, for each part."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for part in (odd, *changed(value[key], odd)):
            copy = value.copy()
            copy[key] = part
            yield copy


@pytest.mark.parametrize(("kind", "item"), WHOLE)
def test_odd_values_anywhere_are_read_or_refused_with_the_index(
    tokenizer: TextTokenizer, kind: Any, item: dict[str, Any]
) -> None:
    items = [item, *(each for odd in ODD for each in changed(item, odd))]
    dataset = kind(items, tokenizer, 256, chat_template=CALLS)
    refused = 0
    assert dataset[0] is not None
    for number in range(1, len(items)):
        try:
            dataset[number]
        except FormatError as error:
            assert str(error).startswith(f"conversation {number}: ")
            refused += 1
    assert refused > len(items) / 2
