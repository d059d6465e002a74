"""Renders conversations as text by the chat templates of Hugging Face's tokenizers, and finds messages in the text.

Source: Hugging Face, "Chat templates": Jinja with `messages`, `tools`, `add_generation_prompt` and the special tokens.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from libai_data.data.text.conversations import Message
from libai_data.errors import ConfigError, FormatError, error_text

# Fields of a message besides its content. A template that does not name a field leaves it out.
_OTHER_FIELDS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
_OTHER_TEXTS = "\ue000", "\ue001"  # characters of the private use area
UNKNOWN = -1
SPOKEN = "_spoken_messages"
"""Name of the template variable with all messages."""


class Span(NamedTuple):
    """The place of a message in the text of its conversation, or of a part that a template marks."""

    number: int  # number of the message, or UNKNOWN
    start: int  # the first character of the message's words, behind a generation prompt; or of the part
    stop: int  # the character behind the message's end, without white space after this end; or behind the part


class ChatTemplate:
    """A template of conversations in Jinja, as `chat_template` of `tokenizer_config.json`, with special tokens by names
    such as "bos_token". It has no access to the date, so a conversation always gives the same text. A ConfigError if it
    is not valid Jinja."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._source, self._special = source, dict(special)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationMarks]
        )
        # As Hugging Face's: characters of all scripts, and of HTML, stay as they are.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error
        self._generation_marks = next(
            extension for extension in environment.iter_extensions() if isinstance(extension, GenerationMarks)
        )
        names = {word for _, token, word in environment.lex(source) if token == "name"}
        # Whether the template marks what an assistant says.
        self._has_marks = "generation" in names

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._source, self._special)

    def render(self, messages: Sequence[Message], tools: Any = None, ask: bool = False) -> str:
        """The text of messages, dicts such as {"role": "user", "content": "Hello"}.

        Args:
            tools: the tools that an assistant may use, in the form that the template needs.
            ask: whether the text ends with the generation prompt, which asks an assistant to speak.

        Raises:
            FormatError: The template fails, or the text is not valid Unicode.
        """
        return self._rendered(messages, tools, ask)[0]

    def _rendered(self, messages: Sequence[Message], tools: Any, ask: bool = False) -> tuple[str, list[Span]]:
        try:
            text, parts = self._filled(messages, tools, ask)
        except Exception as error:  # a template can raise any error
            number = self._fails_at(messages, tools, error)
            raise FormatError(f"message {number}: the chat template fails: {error_text(error)}") from error
        try:
            # JSON may contain lone surrogates, which no tokenizer accepts.
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise FormatError(f"it is not Unicode text: {error.reason}, {error.object[error.start]!r}") from error
        return text, parts

    def _filled(self, messages: Sequence[Message], tools: Any, ask: bool) -> tuple[str, list[Span]]:
        given = {"messages": messages, "tools": tools, "add_generation_prompt": ask, SPOKEN: messages}
        return self._generation_marks.removed(self._template.render(**given, **self._special))

    def _fails_at(self, messages: Sequence[Message], tools: Any, error: Exception) -> int:
        """The first message with which the template fails in this way."""
        for number in range(len(messages) - 1):
            try:
                self._filled(messages[: number + 1], tools, False)
            except Exception as earlier:  # a template can raise any error
                if error_text(earlier) == error_text(error):
                    return number
        return len(messages) - 1

    def with_spans(
        self, messages: Sequence[Message], wanted: Collection[int], tools: Any = None
    ) -> tuple[str, list[Span]]:
        """The text of messages, and the places of the `wanted` ones in it.

        If the template marks what an assistant says, by `{% generation %}`, the marks are the places of its messages.

        Raises:
            FormatError: The template leaves a message out, or writes messages differently if others follow, so that
                their places are not known; or see `render`.
        """
        self._check_names(messages, tools)
        text, parts = self._rendered(messages, tools)
        self._check_written(text, messages, tools)
        assistants = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not self._has_marks:
            return text, [self._span(text, messages, number, tools) for number in wanted]
        numbers = [part.number for part in parts]
        if any(number != UNKNOWN for number in numbers):
            # A part marked behind the loop over the messages, such as a final token, belongs to the message before it.
            for place, number in enumerate(numbers):
                numbers[place] = numbers[place - 1] if number == UNKNOWN and place else number
        elif len(numbers) == len(assistants):
            numbers = assistants
        elif parts:
            raise FormatError(
                f"the chat template marks {len(parts)} parts by 'generation', but not in a loop over the messages, of "
                f"which {len(assistants)} are the assistant's; mark each of these once"
            )
        spans = [part for number, part in zip(numbers, parts) if number in wanted and part.start < part.stop]
        others = sorted(set(wanted).difference(assistants, numbers))
        return text, spans + [self._span(text, messages, number, tools) for number in others]

    def _check_names(self, messages: Sequence[Message], tools: Any) -> None:
        """Refuse tools and fields of messages that the template does not name, and so leaves out."""
        if tools and "tools" not in self._source:
            raise FormatError(
                "there are tools, but the chat template does not write them; leave them out, or give another template"
            )
        for number, message in enumerate(messages):
            for name in _OTHER_FIELDS:
                if message.get(name) and not re.search(rf"\b{name}\b", self._source):
                    raise FormatError(
                        f"message {number} has {name}, but the chat template does not write it; give another template"
                    )

    def _check_written(self, text: str, messages: Sequence[Message], tools: Any) -> None:
        """Refuse a message that the template leaves out."""
        for number, message in enumerate(messages):
            content = message.get("content", "").strip()
            # A system message that is found is no proof: the template's own system message may contain the same words.
            if not content or (content in text and message["role"] in ("user", "assistant")):
                continue
            if self.render(self._with_other_text(messages, number), tools) == text:
                raise FormatError(
                    f"message {number} has the role {message['role']!r} and says {content!r:.100}, but the chat "
                    "template does not write it; leave it out, or give a template that writes it (chat_template)"
                )

    @staticmethod
    def _with_other_text(messages: Sequence[Message], number: int) -> list[Message]:
        """The messages, of which one has a content that begins with another character."""
        message = messages[number]
        other = _OTHER_TEXTS[message.get("content", "").strip().startswith(_OTHER_TEXTS[0])]
        return [*messages[:number], {**message, "content": other}, *messages[number + 1 :]]

    def _span(self, text: str, messages: Sequence[Message], number: int, tools: Any) -> Span:
        start, stop = self._start(text, messages, number, tools), len(text)
        if number + 1 < len(messages):
            stop = len(self._before(text, messages, number + 1, tools))
        said = text[start:stop]
        # If nothing else ends the message, the end of the line does.
        ends_line = said.strip() == messages[number].get("content", "").strip()
        return Span(number, start, start + len(said.rstrip(" ") if ends_line else said.rstrip()))

    def _start(self, text: str, messages: Sequence[Message], number: int, tools: Any) -> int:
        if messages[number]["role"] != "assistant":
            return len(self._before(text, messages, number, tools)) if number else 0
        # Many templates cannot write a generation prompt before the first message, and some never write one.
        if number:
            asked = self.render(messages[:number], tools, ask=True)
            if text.startswith(asked) and asked != self.render(messages[:number], tools):
                return len(asked)
        # The words begin where the text with other words differs. A space before them belongs to their first token.
        pairs = enumerate(zip_longest(text, self.render(self._with_other_text(messages, number), tools)))
        place = next((place for place, (one, other) in pairs if one != other), None)
        before = len(self._before(text, messages, number, tools)) if number else 0
        return before if place is None else max(before, len(text[:place].rstrip(" ")))

    def _before(self, text: str, messages: Sequence[Message], number: int, tools: Any) -> str:
        before = self.render(messages[:number], tools)
        if not text.startswith(before):
            # Some templates write this token only at the end of all messages.
            before = before.removesuffix(self._special.get("eos_token", ""))
        if not text.startswith(before):
            raise FormatError(
                f"the chat template writes the first {number} of {len(messages)} messages in another form when others "
                "follow, for example without reasoning, so the end of these messages is not known; in the template, "
                "put the text of the assistant between {% generation %} and {% endgeneration %}, or make one "
                'conversation for each answer, with "weight": 0 in the answers before it'
            )
        return before


def _raise(message: str) -> None:
    raise ValueError(message)


class GenerationMarks(Extension):
    """The tags `{% generation %}` ... `{% endgeneration %}` around what an assistant says. They write marks into the
    text, which `removed` finds and removes.

    Source: Hugging Face, "Chat templates", `return_assistant_tokens_mask`.
    """

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        # A random number, so that no conversation contains the mark.
        self._mark = f"<{random.SystemRandom().getrandbits(96)}:{{}}>"
        self._pattern = re.compile(self._mark.format("(-?\\d*)"))

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin = self.call_method("_begin", [nodes.DerivedContextReference()])
        end = nodes.TemplateData(self._mark.format(""))
        return [nodes.Output([begin], lineno=line), *body, nodes.Output([end], lineno=line)]

    def _begin(self, context: Context) -> str:
        return self._mark.format(_number_of_message(context[SPOKEN], context.get_all()))

    def removed(self, marked: str) -> tuple[str, list[Span]]:
        """The text without marks, and the parts that were between marks."""
        pieces: list[str] = []
        parts: list[Span] = []
        opened: list[tuple[int, int]] = []
        length = behind = 0
        for mark in self._pattern.finditer(marked):
            pieces.append(marked[behind : mark.start()])
            length += len(pieces[-1])
            behind = mark.end()
            if mark[1]:
                opened.append((int(mark[1]), length))
            else:
                parts.append(Span(*opened.pop(), length))
        return "".join([*pieces, marked[behind:]]), parts


def _number_of_message(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> int:
    """The number of the message in a variable of the template, such as that of its loop; UNKNOWN if it is not clear."""
    held = {id(value) for value in variables.values()}
    found = [number for number, message in enumerate(messages) if id(message) in held]
    if len(found) > 1:
        found = [number for number in found if messages[number]["role"] == "assistant"]
    return found[0] if len(found) == 1 else UNKNOWN
