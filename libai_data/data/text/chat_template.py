"""Conversations as text, by the chat templates of Hugging Face's tokenizers, and where messages lie in it.

Source: Hugging Face, "Chat templates": Jinja with `messages`, `tools`, `add_generation_prompt` and the special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from libai_data.errors import ConfigError, FormatError, installed

Message = Mapping[str, Any]
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_OTHER_WORDS = "\ue000"  # of the private use area, with which no message begins


class Span(NamedTuple):
    """Where a message lies in the text of its conversation."""

    start: int  # the first character of what is said, behind what asks for it
    stop: int  # the character behind the message's end, white space behind it left out


class ChatTemplate:
    """A template of conversations. It knows no date, so that a conversation always gives the same text.

    It is in Jinja, as `chat_template` of `tokenizer_config.json`; `special` are names such as "bos_token" -> token.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._source, self._special = source, dict(special)
        jinja2 = installed("jinja2", "chat_template", "'libai_data[text]'")
        sandbox = installed("jinja2.sandbox", "chat_template", "'libai_data[text]'")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        # Some templates mark what an assistant says; here, the text of the messages before tells it.
        plain = _GENERATION.sub(lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", source)
        try:
            self._template = environment.from_string(plain)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is no Jinja: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._source, self._special)

    def render(self, messages: Sequence[Message], tools: Any = None, ask: bool = False) -> str:
        """The text of messages.

        Args:
            messages: such as {"role": "user", "content": "Hello"}.
            tools: that an assistant may use, as the template wants them.
            ask: whether the text ends with what asks an assistant to speak.
        """
        if tools and "tools" not in self._source:
            raise FormatError("there are tools, but the chat template writes none; leave them out, or give another one")
        if "tool_calls" not in self._source and any(message.get("tool_calls") for message in messages):
            raise FormatError("a message has tool_calls, but the chat template writes none; give another one")
        try:
            text = self._template.render(messages=messages, tools=tools, add_generation_prompt=ask, **self._special)
        except Exception as error:  # a template raises anything
            raise FormatError(f"the chat template fails: {type(error).__name__}: {error}") from error
        try:
            # JSON may hold halves of surrogate pairs, which no tokenizer takes.
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise FormatError(f"it is no Unicode text: {error.reason}, {error.object[error.start]!r}") from error
        return str(text)

    def with_spans(
        self, messages: Sequence[Message], wanted: Collection[int], tools: Any = None
    ) -> tuple[str, list[Span]]:
        """The text of messages, and where some of them lie.

        Raises:
            FormatError: The template writes messages otherwise when others follow, so that where they lie is not known;
                or as `render`.
        """
        text = self.render(messages, tools)
        return text, [self._span(text, messages, number, tools) for number in wanted]

    def _span(self, text: str, messages: Sequence[Message], number: int, tools: Any) -> Span:
        start, stop = self._start(text, messages, number, tools), len(text)
        if number + 1 < len(messages):
            stop = len(self._before(text, messages, number + 1, tools))
        return Span(start, start + len(text[start:stop].rstrip()))

    def _start(self, text: str, messages: Sequence[Message], number: int, tools: Any) -> int:
        if messages[number]["role"] != "assistant":
            return len(self._before(text, messages, number, tools)) if number else 0
        # Many templates cannot ask before any message, and some never do.
        if number:
            asked = self.render(messages[:number], tools, ask=True)
            if text.startswith(asked) and asked != self.render(messages[:number], tools):
                return len(asked)
        # Where the text of other words differs, the words begin; a space before them is of their first token.
        changed = {**messages[number], "content": _OTHER_WORDS}
        marked = self.render([*messages[:number], changed, *messages[number + 1 :]], tools)
        pairs = enumerate(zip_longest(text, marked))
        place = next((place for place, (one, other) in pairs if one != other), None)
        before = len(self._before(text, messages, number, tools)) if number else 0
        return before if place is None else max(before, len(text[:place].rstrip(" ")))

    def _before(self, text: str, messages: Sequence[Message], number: int, tools: Any) -> str:
        before = self.render(messages[:number], tools)
        if not text.startswith(before):
            raise FormatError(
                f"the chat template writes the first {number} of {len(messages)} messages otherwise when others follow "
                "them, so that their end is not known; give a template that does not (chat_template), or make one "
                "conversation for each answer"
            )
        return before


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As Hugging Face's: characters of all scripts, and of HTML, stay as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise ValueError(message)
