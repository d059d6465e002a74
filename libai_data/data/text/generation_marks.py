"""`{% generation %}` ... `{% endgeneration %}` of chat templates: the marks around what an assistant says.

Source: Hugging Face, "Chat templates", `return_assistant_tokens_mask`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import Environment, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context

UNKNOWN = -1
SPOKEN = "_spoken_messages"
"""The variable of a template with all messages."""


class MarkedPart(NamedTuple):
    """A part of a text that a template marks."""

    number: int  # of its message, or UNKNOWN
    start: int  # its first character
    stop: int  # the character behind it


class GenerationMarks(Extension):
    """Writes marks into the text, which `removed` finds again."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        # No conversation has the same number in it.
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

    def removed(self, marked: str) -> tuple[str, list[MarkedPart]]:
        """A text without marks, and the parts that these were around."""
        pieces: list[str] = []
        parts: list[MarkedPart] = []
        opened: list[tuple[int, int]] = []
        length = behind = 0
        for mark in self._pattern.finditer(marked):
            pieces.append(marked[behind : mark.start()])
            length += len(pieces[-1])
            behind = mark.end()
            if mark[1]:
                opened.append((int(mark[1]), length))
            else:
                parts.append(MarkedPart(*opened.pop(), length))
        return "".join([*pieces, marked[behind:]]), parts


def _number_of_message(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> int:
    """Which message a template has in a variable, such as that of its loop."""
    held = {id(value) for value in variables.values()}
    found = [number for number, message in enumerate(messages) if id(message) in held]
    if len(found) > 1:
        found = [number for number in found if messages[number]["role"] == "assistant"]
    return found[0] if len(found) == 1 else UNKNOWN
