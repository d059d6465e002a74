"""Tokenizers: the files that define one, and the methods that the pipeline needs."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libai_data.data.cached_property import cached_property
from libai_data.data.sources.paths import check_is_file, checked_path, is_file
from libai_data.data.text.encoders import Encoder, FastEncoder, open_encoder
from libai_data.data.text.special_tokens import SETTINGS, FolderSettings, read_settings, special_tokens
from libai_data.errors import ConfigError, nearest
from libai_data.errors.argument_rules import FLAG, check, whole

MOST_TOKENS = 1 << 24
"""Far more than any vocabulary has; as many tokens, or a typing error, must not fill the memory."""
_RULES = {
    "lower_case": FLAG,
    "extra_ids": whole(0, MOST_TOKENS, "sentinels to add"),
    "chinese_words": FLAG,
    "escape_special_tokens": FLAG,
}
_SENTINEL = re.compile(r"<extra_id_(\d+)>\Z")
_IN_FOLDER = (
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("spiece.model",),
    ("tokenizer.model",),
)


class TextTokenizer:
    """A tokenizer. The ids of its special tokens have the same names as in LiBai and Hugging Face.

    Args:
        encoder: turns texts into tokens.
        extra_ids: number of sentinels `<extra_id_0>` ... to append to a vocabulary that has none. As in T5,
            `<extra_id_0>` gets the largest id.
        settings: the special tokens that the tokenizer's folder names.

    Raises:
        ConfigError: The folder names a token that the vocabulary does not have.
    """

    def __init__(self, encoder: Encoder, extra_ids: int = 0, settings: FolderSettings | None = None) -> None:
        self._encoder = encoder
        settings = settings or FolderSettings()
        self._vocabulary = {**settings.added, **encoder.vocabulary()}
        said = {**encoder.roles(), **settings.roles}
        self._special = special_tokens(self._vocabulary, said, encoder.marked_as_special())
        self._without = settings.without
        self.chat_template = settings.chat_template
        """The template of conversations that the folder has, or ""."""
        if extra_ids and not any(_SENTINEL.match(token) for token in self._vocabulary):
            size = len(self)
            self._vocabulary.update(
                {f"<extra_id_{number}>": size + extra_ids - 1 - number for number in range(extra_ids)}
            )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize texts, without adding special tokens."""
        return self._encoder.encode(texts)

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokenize a text, without adding special tokens; also returns the first character of each token, and the one
        behind it. A ConfigError if the tokenizer is not from a `tokenizer.json`, or escapes special tokens."""
        if type(self._encoder) is not FastEncoder:
            raise ConfigError(
                "only a tokenizer.json gives the places of tokens in a text; pass one, or a folder with one"
            )
        return self._encoder.encode_with_places(text)

    @property
    def special_texts(self) -> dict[str, str]:
        """Names such as "bos_token" -> token, of the special tokens that the vocabulary has, without those that the
        folder sets to null."""
        used = {role: ident for role, ident in self._special.items() if role not in self._without}
        return {f"{role}_token": self.id_to_token(ident) for role, ident in used.items()}

    def get_vocab(self) -> dict[str, int]:
        """Token -> id."""
        return self._vocabulary

    def __len__(self) -> int:
        """One more than the greatest id; decides the size of an embedding, and the dtype of stored tokens."""
        return 1 + max(self._vocabulary.values(), default=-1)

    @property
    def vocab_size(self) -> int:
        """The same as `len`."""
        return len(self)

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        """The sentinels, `<extra_id_0>` first."""
        found = (
            (int(match.group(1)), ident)
            for token, ident in self._vocabulary.items()
            if (match := _SENTINEL.match(token))
        )
        return [ident for _, ident in sorted(found)]

    def id_to_token(self, ident: int) -> str:
        """The token of an id; a KeyError if there is none."""
        return self._tokens[ident]

    @cached_property
    def _tokens(self) -> dict[int, str]:
        return {ident: token for token, ident in self._vocabulary.items()}

    def id_of(self, token: str) -> int:
        """The id of a token; a ConfigError with the nearest one if the vocabulary does not have it."""
        if token not in self._vocabulary:
            raise ConfigError(f"the tokenizer has no token {token!r}.{nearest(token, self._vocabulary)}")
        return self._vocabulary[token]

    @property
    def special_ids(self) -> list[int]:
        """The ids of all special tokens: those with a role, those that the file marks as special, and sentinels."""
        marked = {
            self._vocabulary[token] for token in self._encoder.marked_as_special() or () if token in self._vocabulary
        }
        return sorted({*self._special.values(), *marked, *self.additional_special_tokens_ids})

    cls_token_id = property(lambda self: self._special.get("cls"), doc="Id of [CLS] or <s>, or None.")
    sep_token_id = property(lambda self: self._special.get("sep"), doc="Id of [SEP] or </s>, or None.")
    mask_token_id = property(lambda self: self._special.get("mask"), doc="Id of [MASK] or <mask>, or None.")
    pad_token_id = property(lambda self: self._special.get("pad"), doc="Id of [PAD] or <pad>, or None.")
    unk_token_id = property(lambda self: self._special.get("unk"), doc="Id of [UNK] or <unk>, or None.")
    bos_token_id = property(lambda self: self._special.get("bos"), doc="Id of the token that begins a text, or None.")
    eos_token_id = property(lambda self: self._special.get("eos"), doc="Id of the token that ends a text, or None.")
    eod_token_id = property(lambda self: self._special.get("eod"), doc="Id of the token that ends a document, or None.")


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer, and options.

    Args:
        path: a `tokenizer.json` of Hugging Face's tokenizers, BERT's vocabulary (`.txt`, a token a line), GPT-2's
            vocabulary (`.json`, beside `merges`), a sentencepiece model (`.model`), or a folder with one of these. The
            `tokenizer_config.json` of a Hugging Face folder names the special tokens.
        merges: GPT-2's merges.
        lower_case: whether BERT's tokenizer lowers case and strips accents.
        extra_ids: see `TextTokenizer`.
        chinese_words: mark the second and later characters of Chinese words with "##", for whole-word masking.
        escape_special_tokens: tokenize special tokens in a text, such as "<|endoftext|>", as plain text.

    Raises:
        ConfigError: A file does not exist, or the options do not fit it.
    """

    path: str
    merges: str = ""
    lower_case: bool = False
    extra_ids: int = 0
    chinese_words: bool = False
    escape_special_tokens: bool = False

    def __post_init__(self) -> None:
        check(_RULES, **{name: getattr(self, name) for name in _RULES})
        for path in self.files():
            check_is_file(path, "; nothing is downloaded from a hub", "tokenizer file ")
        kind = self.files()[0].suffix
        if self.chinese_words and kind != ".txt":
            raise ConfigError(f"words of Chinese are marked only with BERT's vocabularies (.txt), not with {self.path}")
        if self.lower_case and kind != ".txt":
            raise ConfigError(
                f"lower_case is for BERT's vocabularies (.txt); {self.path} itself defines how upper case is treated"
            )
        if self.merges and (kind in (".txt", ".model") or checked_path("path", self.path).is_dir()):
            raise ConfigError(f"merges are for BPE's vocabularies (.json), not for {self.path}; leave them out")

    def files(self) -> tuple[Path, ...]:
        """The files themselves; a ConfigError if `path` is a folder without any of them, or no path."""
        given = checked_path("path", self.path)
        if not os.path.isdir(given):
            return (given,) if self.merges in ("", None) else (given, checked_path("merges", self.merges))
        for names in _IN_FOLDER:
            if all(is_file(given / name) for name in names):
                return tuple(given / name for name in names)
        raise ConfigError(f"{given} contains no tokenizer: none of {[' and '.join(names) for names in _IN_FOLDER]}")

    def all_files(self) -> list[Path]:
        """The files themselves, and those of their folder that say which tokens are special."""
        return [*self.files(), *(self.files()[0].parent / name for name in SETTINGS)]

    def settings(self) -> FolderSettings:
        """The settings of the folder, or the defaults for a single file; a ConfigError if a file is damaged."""
        given = checked_path("path", self.path)
        return read_settings(given) if given.is_dir() else FolderSettings()

    def fingerprint(self) -> list[Any]:
        """What decides the tokens: a hash of the files' content, and the options."""
        content = hashlib.blake2b(digest_size=16)
        for path in self.files():
            data = path.read_bytes()
            content.update(f"{path.suffix} {len(data)} ".encode() + data)
        settings = self.settings()
        said = [dict(sorted(settings.roles.items())), settings.lower_case]
        options = [self.lower_case, self.extra_ids, self.chinese_words, self.escape_special_tokens]
        return [content.hexdigest(), *options, said]

    def load(self) -> TextTokenizer:
        """Load the tokenizer; a ConfigError if the files define none, or the package that reads them is missing."""
        files = self.files()
        settings = self.settings()
        try:
            lower_case = self.lower_case or settings.lower_case
            encoder = open_encoder(files, lower_case, self.chinese_words, self.escape_special_tokens)
            return TextTokenizer(encoder, self.extra_ids, settings)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{files[0]} needs the package {error.name}: pip install 'libai_data[text]'") from error


def load_tokenizer(
    path: str,
    merges: str = "",
    lower_case: bool = False,
    extra_ids: int = 0,
    chinese_words: bool = False,
    escape_special_tokens: bool = False,
) -> TextTokenizer:
    """Load a tokenizer, with the arguments of `TokenizerFiles`.

    In a config: `tokenization.tokenizer = LazyCall(load_tokenizer)(path=...)`.

    Raises:
        ConfigError: A file does not exist or defines no tokenizer, or the options do not fit it.
    """
    return TokenizerFiles(path, merges, lower_case, extra_ids, chinese_words, escape_special_tokens).load()
