"""Converts records of conversations and of preference pairs, in the layouts of public datasets, to messages."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from libai_data.errors import FormatError, nearest

Message = Mapping[str, Any]
_OF_MESSAGES = ("messages", "conversations")
_ANSWERS = ("chosen", "rejected")
_ALPACA = ("instruction", "input", "output", "history")
_READ_FIELDS = (*_OF_MESSAGES, *_ANSWERS, *_ALPACA, "prompt", "system", "tools")
# Names of fields that other tools read, and this module does not.
_UNREAD_FIELDS = ("system_prompt", "functions", "question", "query", "response", "completion")
_IN_MESSAGE = ("role", "content", "weight", "tool_calls", "reasoning_content")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}
_ROLES = ("system", "user", "assistant", "tool")
_SIMILARITY = 0.85


def messages_of(item: Any) -> tuple[Sequence[Message], Any]:
    """The messages of a conversation, and the tools that its assistant may use; a FormatError for other layouts."""
    item = _plain(item)
    named = _first_field(item, _OF_MESSAGES)
    if named:
        used, messages = [named], checked(item[named])
    elif isinstance(item, Mapping) and "instruction" in item and "output" in item:
        used, messages = list(_ALPACA), _alpaca(item, [_text(item, "output")])
    else:
        raise FormatError(
            f"it has the fields {names_in(item)}; a conversation has 'messages', or 'instruction' and 'output'"
            f"{_hint(item, (*_OF_MESSAGES, 'instruction', 'output'))}"
        )
    after_system = _with_system(item, messages)
    # Records of pairs are also used for fine-tuning on their messages; the two answers are then ignored.
    _check_used(item, [*used, *_ANSWERS], after_system)
    return after_system, _tools_of(item)


def pair_of(item: Any) -> tuple[Sequence[Message], Sequence[Message], Any]:
    """The two conversations of a preference pair, the preferred one first, and the tools that its assistants may use; a
    FormatError for other layouts."""
    item = _plain(item)
    if not isinstance(item, dict) or any(name not in item for name in _ANSWERS):
        raise FormatError(
            f"it has the fields {names_in(item)}; a pair has 'chosen' and 'rejected'{_hint(item, _ANSWERS)}"
        )
    used, prompt = _prompt_of(item)
    answers = [_messages_in(item[name], "assistant") for name in _ANSWERS]
    if not prompt and any(isinstance(item[name], str) for name in _ANSWERS):
        raise FormatError(
            f"it has the fields {names_in(item)}; a pair of texts needs the text that they answer in 'prompt', or "
            f"messages before them in 'messages'{_hint(item, ('prompt', 'messages'))}"
        )
    both = [_with_system(item, _answered(prompt, used, name, answer)) for name, answer in zip(_ANSWERS, answers)]
    _check_used(item, [*_ANSWERS, *used], [*both[0], *both[1]])
    return both[0], both[1], _tools_of(item)


def _prompt_of(item: Mapping[str, Any]) -> tuple[Sequence[str], list[Message]]:
    """The names of the fields with the prompt of a pair, and the messages of the prompt."""
    if item.get("prompt") is not None:
        return ["prompt"], _messages_in(item["prompt"], "user")
    named = _first_field(item, _OF_MESSAGES)
    if named:
        messages = checked(item[named])
        answers = [item[name] for name in _ANSWERS]
        # Some datasets repeat the preferred conversation under this name.
        if any(not isinstance(answer, (str, Mapping)) and _same(messages, checked(answer)) for answer in answers):
            return [], []
        return [named], messages
    if not _is_empty(item.get("instruction")):
        return ["instruction", "input", "history"], _alpaca(item, [])
    return [], []


def _answered(prompt: list[Message], used: Sequence[str], name: str, answer: list[Message]) -> list[Message]:
    """The conversation of an answer, which may repeat the prompt."""
    first = next((number for number, message in enumerate(answer) if message["role"] != "system"), 0)
    for start in {0, first}:
        if prompt and _same(answer[start : start + len(prompt)], prompt):
            return answer
    if prompt and answer and prompt[-1]["role"] != "assistant" and answer[0]["role"] in ("system", "user"):
        raise FormatError(
            f"its {name!r} begins with a message of the role {answer[0]['role']!r}, as a whole conversation does, but "
            f"not with the messages in {used[0]!r}; leave {used[0]!r} out, or only the answer in {name!r}"
        )
    return [*prompt, *answer]


def _same(ones: Sequence[Message], others: Sequence[Message]) -> bool:
    said = [[(each["role"], str(each.get("content")).strip()) for each in messages] for messages in (ones, others)]
    return said[0] == said[1]


def _alpaca(item: Mapping[str, Any], answers: list[str]) -> list[Message]:
    """The messages in Alpaca's fields, with `answers` at the end (pairs have their answers in other fields)."""
    parts = _text(item, "instruction"), _text(item, "input") if item.get("input") else ""
    texts = [text for turn in _history_of(item) for text in turn]
    texts += ["\n\n".join(part for part in parts if part), *answers]
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def _text(item: Mapping[str, Any], name: str) -> str:
    if not isinstance(item[name], str):
        raise FormatError(f"its {name!r} is {item[name]!r:.100}; it must be a text")
    return str(item[name])


def _history_of(item: Mapping[str, Any]) -> list[Sequence[str]]:
    """What a user and an assistant said before, in pairs."""
    history = item.get("history")
    pairs = history if isinstance(history, list) else [] if history is None else [history]
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise FormatError(
                f"its 'history' has {pair!r:.100}; it must be a list of pairs: what a user said, and the answer"
            )
    return pairs


def _with_system(item: Mapping[str, Any], messages: Sequence[Message]) -> Sequence[Message]:
    """The messages, behind the system message of the item's field 'system', if there is one."""
    system = item.get("system")
    if system is None or (isinstance(system, str) and not system):
        return messages
    if not isinstance(system, str):
        raise FormatError(f"its 'system' is {system!r:.100}; it must be a text")
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if messages[0].get("content") != system:
        raise FormatError("its 'system' is not the system message that its messages begin with; leave one of them out")
    return messages


def _tools_of(item: Mapping[str, Any]) -> Any:
    tools = item.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise FormatError(f"its tools are {tools!r:.100}; they must be a list, one for each tool")
    return tools or None


def _check_used(item: Mapping[str, Any], used: Collection[str], messages: Sequence[Message]) -> None:
    """Refuse a known or misspelled field that is not used, and whose text is in none of the messages."""
    for name, value in item.items():
        known = _known(str(name))
        if not known or name in (*used, "system", "tools") or _is_empty(value):
            continue
        if all(any(text in message.get("content", "") for message in messages) for text in _texts(value)):
            continue
        hint = "" if known == name else f" Did you mean {known!r}?"
        sources = [each for each in used if each in item]
        raise FormatError(
            f"its {name!r} is not used, because the messages are in {sources}, which do not repeat it; leave {name!r} "
            f"out, or put what it says into {sources}.{hint}"
        )


@lru_cache(maxsize=1024)
def _known(name: str, names: Sequence[str] = (*_READ_FIELDS, *_UNREAD_FIELDS)) -> str:
    """The known name that equals `name`, or is so similar that `name` is likely misspelled; "" if there is none."""
    if name in names:
        return name
    close = [] if name.endswith("_id") else difflib.get_close_matches(name.lower(), names, n=1, cutoff=_SIMILARITY)
    return close[0] if close else ""


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = value.get("content", value.get("value", list(value.values())))
    if isinstance(value, list):
        return [text for each in value for text in _texts(each)]
    return [value.strip() if isinstance(value, str) else repr(value)]


def checked(messages: Any) -> list[Message]:
    """Messages with a role, and a content that is a text; a FormatError with the number of any other value."""
    if not isinstance(messages, list) or not messages:
        raise FormatError(f"its messages are {messages!r:.100}; they must be a list of one or more")
    return [_message(number, message) for number, message in enumerate(messages)]


def _message(number: int, message: Any) -> Message:
    if isinstance(message, Mapping) and "from" in message and "value" in message and "role" not in message:
        speaker = str(message["from"])
        role = _SHAREGPT_ROLES.get(speaker, speaker)
        if role not in _ROLES:
            allowed = [*_SHAREGPT_ROLES, *_ROLES]
            raise FormatError(f"message {number} is from {speaker!r:.100}; it must be from one of {allowed}")
        rest = {name: value for name, value in message.items() if name not in ("from", "value")}
        message = {"role": role, "content": message["value"], **rest}
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise FormatError(f"message {number} is {message!r:.100}; it must have a 'role' and a 'content'")
    intended = {name: _known(str(name), _IN_MESSAGE) for name, value in message.items() if not _is_empty(value)}
    for name, known in intended.items():
        if known not in ("", name):
            raise FormatError(f"message {number} has {name!r}, which is not used. Did you mean {known!r}?")
    found = {name: value for name, value in message.items() if name != "content"}
    if "content" not in message and not found.get("tool_calls"):
        raise FormatError(
            f"message {number} has the fields {names_in(message)}; it must have a 'content', null if nothing is "
            "said, or 'tool_calls'"
        )
    calls = found.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
        raise FormatError(
            f"message {number} has the tool_calls {calls!r:.100}; they must be a list of calls, each with the 'name' "
            "of a tool, or with a 'function' that has a 'name'"
        )
    return {**found, "content": _content(number, message["content"])} if "content" in message else found


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _content(number: int, content: Any) -> str:
    """The text of a message, because templates would write None, or a list of parts, in Python's notation."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, (str, dict)) for part in content):
        texts = [part if isinstance(part, str) else part.get("text") for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise FormatError(
        f"message {number} has the content {content!r:.100}; it must be a text, or a list of parts of text"
    )


def _messages_in(said: Any, role: str) -> list[Message]:
    if said is None:
        return []
    if isinstance(said, str):
        return [{"role": role, "content": said}]
    return checked([said] if isinstance(said, Mapping) else said)


def _plain(value: Any) -> Any:
    """A value with JSON's types, because tables of pyarrow and pandas contain numpy's arrays and numbers."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, (np.generic, np.ndarray)) else value


def _first_field(item: Any, names: Sequence[str]) -> str:
    """The first of these names for which an item has a value that is not None, or ""."""
    return next((name for name in names if isinstance(item, Mapping) and item.get(name) is not None), "")


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, dict, list)) and not value)


def _hint(item: Any, wanted: Sequence[str]) -> str:
    hints = (nearest(name, wanted) for name in item if name not in wanted) if isinstance(item, Mapping) else ()
    return next((f".{hint}" for hint in hints if hint), "")


def names_in(item: Any) -> Any:
    """The names of a mapping, or the type of any other item, for error messages."""
    return sorted(map(str, item)) if isinstance(item, Mapping) else f"of a {type(item).__name__}"
