"""Which tokens are special: those that a Hugging Face folder or a file names, or those that are usual."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libai_data.errors import ConfigError

ROLES = ("cls", "sep", "mask", "pad", "bos", "eos", "eod")
_ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<eos>",
    "[EOS]",
    "</s>",
)
_BEGINS = ("<|begin_of_text|>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<bos>", "[BOS]", "<s>", "<|endoftext|>")
# Names of the special tokens in the vocabularies of BERT, T5 and RoBERTa, GPT-2, Llama, DeepSeek and Gemma. The first
# one that a vocabulary has counts.
_USUAL: dict[str, tuple[str, ...]] = {
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "bos": _BEGINS,
    "eos": _ENDS,
}
# These tokens only end documents.
_EOD = ("<eod>", "[EOD]")
SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")


@dataclass(frozen=True)
class FolderSettings:
    """The settings of a Hugging Face folder besides the tokenizer itself, from the files in `SETTINGS`."""

    roles: Mapping[str, str] = field(default_factory=dict)  # such as "eos" -> token
    without: Collection[str] = ()  # roles that have no token, by an explicit null
    added: Mapping[str, int] = field(default_factory=dict)  # tokens beside those of the vocabulary -> id
    lower_case: bool = False
    chat_template: str = ""  # of conversations, in Jinja, or ""


def read_settings(folder: Path) -> FolderSettings:
    """Read the settings of a folder, if it has such files; a ConfigError if a file is damaged."""
    found: dict[str, Any] = {}
    for name in SETTINGS:
        path = folder / name
        if path.is_file():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{path} is not JSON: {error}") from error
            if not isinstance(content, dict):
                raise ConfigError(f"{path} contains a JSON {type(content).__name__}, but an object is expected")
            found.update(content)
    roles = {role: _content(found.get(f"{role}_token")) for role in ROLES}
    added = found.get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(ident.isdecimal() for ident in added):
        raise ConfigError(f"{folder}: added_tokens_decoder is {added!r:.100}; it must have ids as keys")
    return FolderSettings(
        {role: token for role, token in roles.items() if token},
        [role for role, token in roles.items() if not token and f"{role}_token" in found],
        {_content(token): int(ident) for ident, token in added.items()},
        bool(found.get("do_lower_case")),
        _chat_template(folder, found.get("chat_template")),
    )


def _chat_template(folder: Path, found: Any) -> str:
    """The template in its own file, or the one in `tokenizer_config.json`, which may be the default of several."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        try:
            return own.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{own} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from error
    if isinstance(found, list):
        found = {each.get("name"): each.get("template") for each in found if isinstance(each, Mapping)}.get("default")
    if not isinstance(found, (str, type(None))):
        raise ConfigError(
            f"{folder}: the chat_template is {found!r:.100}; it must be a text in Jinja, or a list of objects with a "
            "'name' and a 'template'"
        )
    return found or ""


def special_tokens(
    vocabulary: Mapping[str, int], said: Mapping[str, str], marked: Collection[str] | None
) -> dict[str, int]:
    """Role -> id, of the roles that a vocabulary has; a ConfigError if it does not have a token of `said`.

    Args:
        said: role -> token, from the tokenizer's files.
        marked: tokens that the tokenizer's file marks as special; others, such as HTML's </s>, are text. None if it
            marks none.
    """
    for role, token in said.items():
        if token not in vocabulary:
            raise ConfigError(
                f"the tokenizer's files name {token!r} as {role}_token, which its vocabulary does not have"
            )
    found = {role: vocabulary[token] for role, token in said.items()}
    candidates = vocabulary if marked is None else [token for token in vocabulary if token in marked]
    for role, usual in _USUAL.items():
        there = [token for token in usual if token in candidates]
        if role not in found and there:
            found[role] = vocabulary[there[0]]
    if "eod" not in found:
        ends = [vocabulary[token] for token in _EOD if token in vocabulary]
        ends += [found[role] for role in ("eos", "sep") if role in found]
        if ends:
            found["eod"] = ends[0]
    return found


def _content(token: Any) -> str:
    """The text of a token, which may be an object with more fields."""
    return str(token.get("content") or "") if isinstance(token, Mapping) else str(token or "")
