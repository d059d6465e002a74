"""Tokenizers: the files that define one, and what the pipeline asks of it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libai_data.errors import ConfigError
from libai_data.data.text.encoders import Encoder, open_encoder

# What the special tokens are called in BERT's, T5's and RoBERTa's, and GPT-2's vocabularies, the first found counts.
_SPECIAL: dict[str, tuple[str, ...]] = {
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
    "bos": ("[BOS]", "<s>", "<|endoftext|>"),
    "eos": ("[EOS]", "</s>", "<|endoftext|>"),
    "eod": ("<eod>", "[EOD]", "<|endoftext|>", "[EOS]", "</s>", "[SEP]"),
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
    """A tokenizer, with the ids of its special tokens under the names that LiBai's and Hugging Face's have.

    Args:
        encoder: what encodes.
        extra_ids: sentinels `<extra_id_0>` ... to add behind a vocabulary that has none, the first one last, as in T5.
    """

    def __init__(self, encoder: Encoder, extra_ids: int = 0) -> None:
        self._encoder = encoder
        self._vocabulary = dict(encoder.vocabulary())
        if extra_ids and not any(_SENTINEL.match(token) for token in self._vocabulary):
            size = len(self)
            self._vocabulary.update(
                {f"<extra_id_{number}>": size + extra_ids - 1 - number for number in range(extra_ids)}
            )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, none added at their ends."""
        return self._encoder.encode(texts)

    def get_vocab(self) -> dict[str, int]:
        """Token -> id."""
        return self._vocabulary

    def __len__(self) -> int:
        """One more than the greatest id: what an embedding needs, and the tokens' dtype depends on."""
        return 1 + max(self._vocabulary.values(), default=-1)

    @property
    def vocab_size(self) -> int:
        """The same."""
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

    cls_token_id = property(lambda self: self._special("cls"), doc="Id of [CLS] or <s>, or None.")
    sep_token_id = property(lambda self: self._special("sep"), doc="Id of [SEP] or </s>, or None.")
    mask_token_id = property(lambda self: self._special("mask"), doc="Id of [MASK] or <mask>, or None.")
    pad_token_id = property(lambda self: self._special("pad"), doc="Id of [PAD] or <pad>, or None.")
    bos_token_id = property(lambda self: self._special("bos"), doc="Id of what begins a text, or None.")
    eos_token_id = property(lambda self: self._special("eos"), doc="Id of what ends a text, or None.")
    eod_token_id = property(lambda self: self._special("eod"), doc="Id of what ends a document, or None.")

    def _special(self, role: str) -> int | None:
        return next((self._vocabulary[token] for token in _SPECIAL[role] if token in self._vocabulary), None)


@dataclass(frozen=True)
class TokenizerFiles:
    """The files that define a tokenizer, and how it is to be used.

    Args:
        path: a `tokenizer.json` of Hugging Face's tokenizers, BERT's vocabulary (`.txt`, a token a line), GPT-2's
            vocabulary (`.json`, beside `merges`), a sentencepiece model (`.model`), or a folder with one of these.
        merges: GPT-2's merges.
        lower_case: whether BERT's tokenizer lowers case and strips accents.
        extra_ids: see `TextTokenizer`.
        chinese_words: mark the characters of a Chinese word behind the first by "##", for whole-word masking.

    Raises:
        ConfigError: A file is not there, or the options do not fit it.
    """

    path: str
    merges: str = ""
    lower_case: bool = False
    extra_ids: int = 0
    chinese_words: bool = False

    def __post_init__(self) -> None:
        if self.extra_ids < 0:
            raise ConfigError(f"extra_ids is {self.extra_ids}; it counts sentinels to add")
        for path in self.files():
            if not path.is_file():
                raise ConfigError(f"there is no tokenizer file {path}")
        kind = self.files()[0].suffix
        if self.chinese_words and kind != ".txt":
            raise ConfigError(f"words of Chinese are marked in BERT's vocabularies (.txt) alone, not in {self.path}")
        if self.lower_case and kind != ".txt":
            raise ConfigError(
                f"lower_case is for BERT's vocabularies (.txt); {self.path} says itself what it does with upper case"
            )
        if self.merges and kind in (".txt", ".model"):
            raise ConfigError(f"merges are for BPE's vocabularies (.json), not for {self.path}")

    def files(self) -> tuple[Path, ...]:
        """The files themselves.

        Raises:
            ConfigError: `path` is a folder without any of them.
        """
        given = Path(self.path)
        if not given.is_dir():
            return (given, Path(self.merges)) if self.merges else (given,)
        for names in _IN_FOLDER:
            if all((given / name).is_file() for name in names):
                return tuple(given / name for name in names)
        raise ConfigError(f"{given} holds no tokenizer: none of {[' and '.join(names) for names in _IN_FOLDER]}")

    def fingerprint(self) -> list[Any]:
        """What decides the tokens: a hash of the files' content, and the options."""
        content = hashlib.blake2b(digest_size=16)
        for path in self.files():
            data = path.read_bytes()
            content.update(f"{path.suffix} {len(data)} ".encode() + data)
        return [content.hexdigest(), self.lower_case, self.extra_ids, self.chinese_words]

    def load(self) -> TextTokenizer:
        """The tokenizer.

        Raises:
            ConfigError: The files define none, or the package that reads them is not installed.
        """
        files = self.files()
        try:
            return TextTokenizer(open_encoder(files, self.lower_case, self.chinese_words), self.extra_ids)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{files[0]} needs the package {error.name}: pip install 'libai_data[text]'") from error
