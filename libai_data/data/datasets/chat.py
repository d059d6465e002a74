"""Samples for fine-tuning: conversations of which some messages carry loss, and pairs of which one is preferred."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from libai_data.data.datasets.combine import check_index
from libai_data.data.datasets.fingerprint import fingerprint_of
from libai_data.data.sources import JsonLinesSource
from libai_data.data.text.chat_template import ChatTemplate, Message
from libai_data.data.text.tokenizer import TextTokenizer
from libai_data.errors import ConfigError, FormatError
from libai_data.errors.argument_rules import FLAG, check, check_types, one_of, whole
from libai_data.structures import DistTensorData, Instance

REFUSE, CUT_END, CUT_START = "refuse", "cut_end", "cut_start"
_RULES = {"max_seq_length": whole(1, 1 << 22), "too_long": one_of(REFUSE, CUT_END, CUT_START), "pad": FLAG}


class _Tokens(NamedTuple):
    """A conversation."""

    ids: np.ndarray  # int64 [n]
    loss: np.ndarray  # bool [n], whether a token is to be predicted


class ChatDataset:
    """Conversations for fine-tuning; the loss counts the assistant's tokens only.

    A conversation is a mapping with `messages` (each has a `role` and a `content`) and, if the template supports them,
    `tools`; or a mapping with Alpaca's fields `instruction`, `input`, `output` and `history` (pairs of what a user and
    the assistant said before). `system` is the text of a system message before all others. `"weight": 0` excludes a
    message from the loss, and `"weight": 1` includes it, whatever its role is.

    Fields of a sample of n + 1 tokens: `input_ids` int64 [n]; `labels` int64 [n], the next tokens; and `loss_mask`
    float32 [n], 1 where a label counts, which includes the token that ends a message. `labels` and `loss_mask` are for
    the last pipeline stage. With `pad`, n is `max_seq_length`, and `segment_ids` int64 [n] is 1 for the conversation
    and 0 for padding. Without `pad`, samples have different lengths: pack them with `PackedDataset(..., cut=False)`, or
    pad them with a `PadCollator`.

    Args:
        conversations: JSON lines (files, globs or folders), or a dataset of mappings.
        tokenizer: the result of `load_tokenizer` for a `tokenizer.json`, or for a folder with one.
        max_seq_length: longest sample, tokens.
        chat_template: in Jinja; by default that of the tokenizer's folder.
        loss_roles: the roles whose messages carry loss.
        too_long: what happens to longer samples: "refuse" raises an error, "cut_end" drops the last tokens, "cut_start"
            the first ones.
        pad: whether samples are padded to `max_seq_length`.
        segments: with `pad`, the name of `segment_ids`. None leaves the field out; then padding counts as tokens.

    Raises:
        ConfigError: An argument is out of range, there is no template, or the tokenizer is of another kind.
        FormatError: On reading: an item is no conversation, is too long, or has no token that carries loss.
    """

    def __init__(
        self,
        conversations: Any,
        tokenizer: Any,
        max_seq_length: int,
        chat_template: str = "",
        loss_roles: Sequence[str] = ("assistant",),
        too_long: str = REFUSE,
        pad: bool = True,
        segments: str | None = "segment_ids",
    ) -> None:
        check_types(ChatDataset, locals())
        check(_RULES, max_seq_length=max_seq_length, too_long=too_long, pad=pad)
        if not isinstance(tokenizer, TextTokenizer):
            raise ConfigError(f"the tokenizer is a {type(tokenizer).__name__}; pass the result of load_tokenizer(path)")
        template = chat_template or tokenizer.chat_template
        if not template:
            raise ConfigError(
                "there is no chat template: the tokenizer's folder has none in tokenizer_config.json or "
                "chat_template.jinja; give chat_template"
            )
        paths = conversations if isinstance(conversations, (list, tuple)) else [conversations]
        named = bool(paths) and all(isinstance(path, (str, PathLike)) for path in paths)
        self.conversations = JsonLinesSource(conversations) if named else conversations
        self.max_seq_length, self._too_long, self._pad = max_seq_length, too_long, pad
        self._segments = segments if pad else None
        self._loss_roles = tuple(loss_roles)
        self._tokenizer = tokenizer
        self._template = ChatTemplate(template, tokenizer.special_texts)
        ids = (tokenizer.pad_token_id, tokenizer.eod_token_id, 0)
        self._pad_id = next(ident for ident in ids if ident is not None)
        decides = json.dumps([template, tokenizer.special_texts, sorted(tokenizer.get_vocab().items())])
        self._digest = hashlib.blake2b(decides.encode(), digest_size=8).hexdigest()

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> Instance:
        check_index(index, len(self))
        try:
            return Instance(**self._fields(self.conversations[index]))
        except FormatError as error:
            raise FormatError(f"conversation {index}: {error}") from error

    def fingerprint(self) -> dict[str, Any]:
        """What decides the samples, beside the conversations themselves."""
        options = [self.max_seq_length, list(self._loss_roles), self._too_long, self._pad]
        return {**fingerprint_of(self.conversations), "chat": [self._digest, *options]}

    def _fields(self, item: Any) -> dict[str, DistTensorData]:
        messages, tools = messages_of(item)
        return self._sample(self._tokens(messages, tools, 0))

    def _tokens(self, messages: Sequence[Message], tools: Any, first: int) -> _Tokens:
        """The tokens of messages, of which those from number `first` on may carry loss."""
        wanted = [number for number in range(first, len(messages)) if self._carries_loss(number, messages[number])]
        if not wanted:
            roles = [message["role"] for message in messages[first:]]
            raise FormatError(
                f"of the messages from number {first} on, none carries loss: their roles are {roles}, and loss_roles "
                f"is {list(self._loss_roles)}"
            )
        text, spans = self._template.with_spans(messages, wanted, tools)
        ids, starts = self._tokenizer.encode_with_starts(text)
        places = np.array(starts, np.int64)
        loss = np.zeros(len(ids), bool)
        for span in spans:
            loss |= (places >= span.start) & (places < span.stop)
        return _Tokens(np.array(ids, np.int64), loss)

    def _carries_loss(self, number: int, message: Message) -> bool:
        weight = message.get("weight")
        # Of an array, `in` compares the elements.
        if weight is not None and not (np.isscalar(weight) and weight in (0, 1)):
            raise FormatError(f"message {number} has the weight {weight!r:.100}; it must be 0 or 1")
        return message["role"] in self._loss_roles if weight is None else bool(weight)

    def _sample(self, tokens: _Tokens, prefix: str = "") -> dict[str, DistTensorData]:
        inputs, labels, loss = tokens.ids[:-1], tokens.ids[1:], tokens.loss[1:].astype(np.float32)
        longest, count = self.max_seq_length, len(inputs)
        if count > longest:
            if self._too_long == REFUSE:
                raise FormatError(
                    f"it has {count} tokens, and max_seq_length is {longest}; set a greater one, or too_long to "
                    f"{CUT_END!r} or {CUT_START!r}"
                )
            kept = slice(0, longest) if self._too_long == CUT_END else slice(count - longest, count)
            inputs, labels, loss = inputs[kept], labels[kept], loss[kept]
        if not loss.any():
            kept_words = f" of which {len(loss)} are kept," if count > longest else ""
            raise FormatError(f"of {count} tokens,{kept_words} none carries loss; loss_roles: {list(self._loss_roles)}")
        fields = {
            "input_ids": (inputs, self._pad_id, 0),
            "labels": (labels, self._pad_id, -1),
            "loss_mask": (loss, 0, -1),
        }
        if self._segments:
            fields[self._segments] = np.ones_like(inputs), 0, 0
        rest = longest - len(inputs) if self._pad else 0
        return {
            prefix + name: DistTensorData(np.pad(values, (0, rest), constant_values=filler), placement_idx=stage)
            for name, (values, filler, stage) in fields.items()
        }


class PreferenceDataset(ChatDataset):
    """Pairs of conversations of which one is preferred; the loss does not count their common beginning.

    An item is a mapping with `chosen` and `rejected`: each is a list of messages, or the text of an assistant's answer.
    `prompt` (messages, or the text of a user) is before both; texts need it. `tools` and `system` are those of
    `ChatDataset`.

    Fields: those of `ChatDataset`, once with `chosen_` and once with `rejected_` before their names. The arguments are
    the same.
    """

    def _fields(self, item: Any) -> dict[str, DistTensorData]:
        if not isinstance(item, Mapping) or "chosen" not in item or "rejected" not in item:
            raise FormatError(f"it has the fields {_names(item)}; a pair has 'chosen' and 'rejected'")
        if _history_of(item):
            raise FormatError("it has a 'history', which pairs do not have; put it into 'prompt', as messages")
        if item.get("prompt") is None and any(isinstance(item[name], str) for name in ("chosen", "rejected")):
            raise FormatError(
                f"it has the fields {_names(item)}; a pair of texts needs the text that they answer in 'prompt'"
            )
        prompt = _spoken(item.get("prompt"), "user")
        answers = [_spoken(item[name], "assistant") for name in ("chosen", "rejected")]
        # Some data sets repeat the prompt in both answers.
        repeats = prompt and all(answer[: len(prompt)] == prompt for answer in answers)
        both = [_with_system(item, _checked(answer if repeats else [*prompt, *answer])) for answer in answers]
        shared = next((n for n, (one, other) in enumerate(zip(*both)) if one != other), min(map(len, both)))
        if shared == len(both[0]) == len(both[1]):
            raise FormatError("its 'chosen' and 'rejected' are the same; a pair needs two answers")
        fields: dict[str, DistTensorData] = {}
        for name, messages in zip(("chosen_", "rejected_"), both):
            fields.update(self._sample(self._tokens(messages, _tools_of(item), shared), name))
        return fields


def messages_of(item: Any) -> tuple[Sequence[Message], Any]:
    """The messages of a conversation, and the tools that its assistant may use."""
    if isinstance(item, Mapping) and "messages" in item:
        return _with_system(item, _checked(item["messages"])), _tools_of(item)
    if isinstance(item, Mapping) and "instruction" in item and "output" in item:
        texts = {**item, "input": item.get("input") or ""}
        for name in ("instruction", "input", "output"):
            if not isinstance(texts[name], str):
                raise FormatError(f"its {name!r} is {texts[name]!r:.100}; it must be a text")
        asked = "\n\n".join(part for part in (texts["instruction"], texts["input"]) if part)
        turns = [*_history_of(item), (asked, item["output"])]
        spoken = [{"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn)]
        return _with_system(item, spoken), _tools_of(item)
    raise FormatError(f"it has the fields {_names(item)}; a conversation has 'messages', or 'instruction' and 'output'")


def _history_of(item: Mapping[str, Any]) -> list[Sequence[str]]:
    """What a user and an assistant said before, in pairs."""
    history = item.get("history")
    turns = _as_list([] if history is None else history)
    pairs = [_as_list(turn) for turn in turns] if isinstance(turns, list) else [turns]
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise FormatError(
                f"its 'history' has {pair!r:.100}; it must be a list of pairs: what a user said, and the answer"
            )
    return pairs


def _with_system(item: Mapping[str, Any], messages: Sequence[Message]) -> Sequence[Message]:
    """Messages after the system message that an item has beside them, if it has one."""
    system = item.get("system")
    if system is None or (isinstance(system, str) and not system):
        return messages
    if not isinstance(system, str):
        raise FormatError(f"its 'system' is {system!r:.100}; it must be a text")
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if messages[0].get("content") != system:
        raise FormatError("its 'system' is not the system message that its messages begin with; leave one of them out")
    return messages


def _tools_of(item: Mapping[str, Any]) -> Any:
    tools = _as_list(item.get("tools"))
    if tools is not None and not isinstance(tools, list):
        raise FormatError(f"its tools are {tools!r:.100}; they must be a list, one for each tool")
    return tools or None


def _as_list(value: Any) -> Any:
    # As tables of pyarrow and pandas hold lists.
    return list(value) if isinstance(value, (np.ndarray, tuple)) else value


def _checked(messages: Any) -> Sequence[Message]:
    messages = _as_list(messages)
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise FormatError(f"its messages are {messages!r:.100}; they must be a list of one or more")
    checked = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise FormatError(f"message {number} is {message!r:.100}; it must have a 'role' and a 'content'")
        if "content" not in message and not message.get("tool_calls"):
            raise FormatError(
                f"message {number} has the fields {_names(message)}; it must have a 'content', null if nothing is "
                "said, or 'tool_calls'"
            )
        text = {"content": _text_of(number, message["content"])} if "content" in message else {}
        checked.append({**message, **text})
    return checked


def _text_of(number: int, content: Any) -> str:
    """The text of a message: templates would write `None`, or a list of parts, as Python shows them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = _as_list(content)
    if isinstance(parts, list) and all(isinstance(part, (str, Mapping)) for part in parts):
        texts = [part if isinstance(part, str) else part.get("text") for part in parts]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise FormatError(
        f"message {number} has the content {content!r:.100}; it must be a text, or a list of parts of text"
    )


def _spoken(said: Any, role: str) -> list[Message]:
    return [] if said is None else [{"role": role, "content": said}] if isinstance(said, str) else list(_checked(said))


def _names(item: Any) -> Any:
    return sorted(map(str, item)) if isinstance(item, Mapping) else f"of a {type(item).__name__}"
