"""Samples for fine-tuning: conversations in which some messages carry loss, and pairs with a preferred answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from os import PathLike
from typing import Any

import numpy as np

from libai_data.data.attributes import attribute_of
from libai_data.data.datasets.combine import check_index, indexed_length
from libai_data.data.datasets.fingerprint import fingerprint_of, hash_of
from libai_data.data.datasets.mapped import Map
from libai_data.data.sources import JsonLinesSource
from libai_data.data.text.conversations import Message, messages_of, pair_of
from libai_data.data.text.tokenizer import TextTokenizer
from libai_data.data.transforms.timing import transform_time
from libai_data.errors import ConfigError, FormatError, installed
from libai_data.errors.argument_rules import check_types, one_of, whole
from libai_data.structures import DistTensorData, Instance

REFUSE, CUT_END, CUT_START = "refuse", "cut_end", "cut_start"
_FIELDS = ("input_ids", "labels", "loss_mask")
_RULES = {"max_seq_length": whole(1, 1 << 22), "too_long": one_of(REFUSE, CUT_END, CUT_START)}


class ChatDataset(Map):
    """Conversations for fine-tuning; the loss counts the assistant's tokens only.

    A conversation is a mapping with `messages` (each has a `role` and a `content`) and, if the template supports them,
    `tools`; or with ShareGPT's `conversations` (`from` and `value`); or with Alpaca's fields `instruction`, `input`,
    `output` and `history` (earlier pairs of a user's message and the answer). `system` is the text of a system message
    before all others. `"weight": 0` excludes a message from the loss, and `"weight": 1` includes it, for any role.

    Fields of a sample of n + 1 tokens: `input_ids` int64 [n]; `labels` int64 [n], the next tokens; and `loss_mask`
    float32 [n], 1 where a label counts, which includes the token that ends a message. `labels` and `loss_mask` are for
    the last pipeline stage. With `pad`, n is `max_seq_length`, and `segment_ids` int64 [n] is 1 for the conversation
    and 0 for padding. Without `pad`, samples have different lengths: pack them with `PackedDataset(..., cut=False)`, or
    pad them with a `PadCollator`.

    Args:
        conversations: JSON lines (files, globs or folders), or a dataset of mappings.
        tokenizer: the result of `load_tokenizer` for a `tokenizer.json`, or for a folder with one.
        max_seq_length: largest length of a sample, in tokens.
        chat_template: Jinja template; by default the template of the tokenizer's folder. If the template has
            `{% generation %}`, the assistant's tokens up to `{% endgeneration %}` carry loss, as for Hugging Face.
        loss_roles: the roles whose messages carry loss.
        too_long: what happens to longer samples: "refuse" raises an error, "cut_end" drops the last tokens, "cut_start"
            drops the first tokens.
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
        check_types(ChatDataset, locals(), _RULES)
        if segments in _FIELDS:
            raise ConfigError(f"segments is {segments!r}, the name of another field; give another name, or None")
        if not isinstance(tokenizer, TextTokenizer):
            raise ConfigError(f"the tokenizer is a {type(tokenizer).__name__}; pass the result of load_tokenizer(path)")
        template = chat_template or tokenizer.chat_template
        if not template:
            raise ConfigError(
                "there is no chat template: the tokenizer's folder has none in tokenizer_config.json or "
                "chat_template.jinja; give chat_template"
            )
        installed("jinja2", "chat_template", "'libai_data[text]'")
        from libai_data.data.text.chat_template import ChatTemplate

        paths = conversations if isinstance(conversations, (list, tuple)) else [conversations]
        named = bool(paths) and all(isinstance(path, (str, PathLike)) for path in paths)
        self.dataset = JsonLinesSource(conversations) if named else conversations
        indexed_length(self.dataset)
        self.max_seq_length, self._too_long, self._pad = max_seq_length, too_long, pad
        self._segments = segments if pad else None
        self._loss_roles = tuple(loss_roles)
        self._tokenizer = tokenizer
        self._template = ChatTemplate(template, tokenizer.special_texts)
        ids = (tokenizer.pad_token_id, tokenizer.eod_token_id, 0)
        self._pad_id = next(ident for ident in ids if ident is not None)
        decides = json.dumps([template, tokenizer.special_texts, sorted(tokenizer.get_vocab().items())])
        self._digest = hash_of(decides.encode(), 8)

    def __getitem__(self, index: int) -> Instance:
        check_index(index, len(self))
        try:
            item = self.dataset[index]
            with transform_time():
                return Instance(**self._fields(item))
        except FormatError as error:
            place_of = attribute_of(self.dataset, "place_of")
            where = f" ({place_of(index)})" if place_of else ""
            raise FormatError(f"conversation {index}{where}: {error}") from error

    def fingerprint(self) -> dict[str, Any]:
        """Fingerprint of the conversations; and template, tokenizer and options, which decide the samples too."""
        options = [self.max_seq_length, list(self._loss_roles), self._too_long, self._pad]
        return {**fingerprint_of(self.dataset), "chat": [self._digest, *options]}

    def _fields(self, item: Any) -> dict[str, DistTensorData]:
        messages, tools = messages_of(item)
        return self._sample(messages, tools, 0, "")

    def _sample(self, messages: Sequence[Message], tools: Any, first: int, prefix: str) -> dict[str, DistTensorData]:
        """The fields of a conversation; only messages from number `first` on may carry loss."""
        wanted = [number for number in range(first, len(messages)) if self._carries_loss(number, messages[number])]
        if not wanted:
            roles = [message["role"] for message in messages[first:]]
            raise FormatError(
                f"no message from number {first} on counts in the loss: their roles are {roles}, and loss_roles is "
                f"{list(self._loss_roles)}"
            )
        text, spans = self._template.with_spans(messages, wanted, tools)
        ids, places = self._tokenizer.encode_with_places(text)
        starts, stops = np.fromiter(chain.from_iterable(places), np.int64, 2 * len(places)).reshape(-1, 2).T
        carries_loss = np.zeros(len(ids), bool)
        for span in spans:
            # As for Hugging Face, a token counts if a part of it does: " Yes" has the space that ends a prompt, and a
            # whole answer.
            carries_loss |= (stops > span.start) & (starts < span.stop)
        return self._laid_out(np.array(ids, np.int64), carries_loss, prefix)

    def _carries_loss(self, number: int, message: Message) -> bool:
        weight = message.get("weight")
        # Exclude arrays first, because `in` would compare their elements.
        if weight is not None and not (np.isscalar(weight) and weight in (0, 1)):
            raise FormatError(f"message {number} has the weight {weight!r:.100}; it must be 0 or 1")
        return message["role"] in self._loss_roles if weight is None else bool(weight)

    def _laid_out(self, tokens: np.ndarray, carries_loss: np.ndarray, prefix: str) -> dict[str, DistTensorData]:
        inputs, labels, loss = tokens[:-1], tokens[1:], carries_loss[1:].astype(np.float32)
        longest, count = self.max_seq_length, len(inputs)
        if count > longest:
            if self._too_long == REFUSE:
                raise FormatError(
                    f"it has {count} tokens, but max_seq_length is {longest}; set a greater max_seq_length, or "
                    f"too_long to {CUT_END!r} or {CUT_START!r}"
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
    """Pairs of a preferred and a rejected conversation; the loss does not count their common beginning.

    An item is a mapping with `chosen` and `rejected`: each is a list of messages, or the text of an assistant's answer.
    Both continue `prompt` (messages, or the text of a user), `messages` or Alpaca's fields; an answer may repeat these.
    If an answer is a text, one of these is required. `tools` and `system` are as in `ChatDataset`.

    Fields: the fields of `ChatDataset`, once with the prefix `chosen_` and once with `rejected_`. The arguments are the
    same.
    """

    def _fields(self, item: Any) -> dict[str, DistTensorData]:
        chosen, rejected, tools = pair_of(item)
        differs = (number for number, (one, other) in enumerate(zip(chosen, rejected)) if one != other)
        shared = next(differs, min(len(chosen), len(rejected)))
        if shared == len(chosen) == len(rejected):
            raise FormatError("its 'chosen' and 'rejected' are the same; a pair needs two answers")
        preferred = self._sample(chosen, tools, shared, "chosen_")
        return {**preferred, **self._sample(rejected, tools, shared, "rejected_")}
