"""Encoders of texts: Hugging Face's tokenizers, sentencepiece, and the marks of Chinese words."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from libai_data.data.sources.storage import cache_home
from libai_data.errors import ConfigError

_UNKNOWN = "[UNK]"
# jieba gets each stretch of these characters separately, because its time grows with the square of the length.
_STRETCHES = re.compile(r"[^\u4E00-\u9FD5a-zA-Z0-9+#&._%\-]*[\u4E00-\u9FD5a-zA-Z0-9+#&._%\-]{0,1024}")


class Encoder:
    """Base of the encoders. They turn texts into tokens, without special tokens at the ends of a text."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text."""
        raise NotImplementedError

    def vocabulary(self) -> dict[str, int]:
        """Token -> id."""
        raise NotImplementedError

    def roles(self) -> dict[str, str]:
        """Role of a special token, such as "eos" -> the token, for the roles that the file names."""
        return {}

    def marked_as_special(self) -> set[str] | None:
        """The tokens that the file marks as special, or None if it marks none."""
        return None


def open_encoder(files: Sequence[Path], lower_case: bool, chinese_words: bool, escape_special: bool = False) -> Encoder:
    """The encoder that files define (see `TokenizerFiles`); a ConfigError if they define none."""
    path = files[0]
    try:
        if path.suffix == ".model":
            return SentencePieceEncoder(path)
        from tokenizers import Tokenizer, models, processors

        if path.suffix == ".txt":
            model = models.WordPiece.from_file(str(path), unk_token=_UNKNOWN)
            if model.token_to_id(_UNKNOWN) is None:
                raise ConfigError(f"{path} has no token {_UNKNOWN}, so it is not a vocabulary of BERT")
            kind = ChineseWordEncoder if chinese_words else FastEncoder
            return kind(as_bert(Tokenizer(model), lower_case))
        if len(files) == 2:
            return FastEncoder(as_gpt2(Tokenizer(models.BPE.from_file(*map(str, files)))))
        tokenizer = Tokenizer.from_file(str(path))
        # A file may enable these, but documents must keep their length, and a text must always give the same tokens.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None):
            tokenizer.model.dropout = None
        # A post-processor may move the place of a token that is a space to the place behind it.
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        # The other kinds of tokenizers never read special tokens in a text.
        tokenizer.encode_special_tokens = escape_special
        return FastEncoder(tokenizer)
    except (ConfigError, ModuleNotFoundError):
        raise
    except Exception as error:  # tokenizers raises bare Exceptions, sentencepiece RuntimeErrors
        raise ConfigError(f"{path} defines no tokenizer: {error}") from error


def as_bert(tokenizer: Any, lower_case: bool) -> Any:
    """Set BERT's normalizer, pre-tokenizer and decoder in a `tokenizers.Tokenizer`; returns the tokenizer."""
    from tokenizers import decoders, normalizers, pre_tokenizers

    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def as_gpt2(tokenizer: Any) -> Any:
    """Make a `tokenizers.Tokenizer` of BPE byte-level, as in GPT-2 and RoBERTa; returns the tokenizer."""
    from tokenizers import decoders, pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class FastEncoder(Encoder):
    """Hugging Face's `tokenizers.Tokenizer`, without the tokens that its post-processor adds at the ends of a text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # The fast method leaves out the places in the text, which `encode` does not need; older versions lack it.
        self._encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._encode(list(texts), add_special_tokens=False)]

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a text, special ones included, and the (start, stop) of each token in characters; a ConfigError
        if the tokenizer escapes special tokens."""
        if self.tokenizer.encode_special_tokens:
            raise ConfigError("the tokenizer escapes special tokens (escape_special_tokens), which chat templates need")
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def vocabulary(self) -> dict[str, int]:
        return dict(self.tokenizer.get_vocab(with_added_tokens=True))

    def marked_as_special(self) -> set[str] | None:
        """The added tokens that are special."""
        marked = {str(token.content) for token in self.tokenizer.get_added_tokens_decoder().values() if token.special}
        return marked or None


class SentencePieceEncoder(Encoder):
    """A model of sentencepiece. It marks no tokens: user-defined symbols may be special or not."""

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        self.model = SentencePieceProcessor(model_file=str(path))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        # One thread, because the caller starts as many processes as it needs.
        return list(self.model.encode(list(texts), out_type=int, num_threads=1))

    def vocabulary(self) -> dict[str, int]:
        return {self.model.id_to_piece(ident): ident for ident in range(self.model.get_piece_size())}

    def roles(self) -> dict[str, str]:
        """The roles of the model, each of which may be missing."""
        idents = {"bos": self.model.bos_id(), "eos": self.model.eos_id(), "pad": self.model.pad_id()}
        return {role: str(self.model.id_to_piece(ident)) for role, ident in idents.items() if ident >= 0}


class ChineseWordEncoder(FastEncoder):
    """BERT's WordPiece with the marks of LiBai's `do_chinese_wwm`. In each Chinese word that jieba finds, characters
    behind the first one become "##" + character, if the vocabulary has this token.
    """

    def __init__(self, tokenizer: Any) -> None:
        import jieba

        super().__init__(tokenizer)
        jieba.setLogLevel(logging.WARNING)
        # jieba caches its dictionary here; its default is the temporary folder, where any user may have put one.
        folder = cache_home()
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        jieba.dt.tmp_dir = str(folder)
        self._cut = jieba.cut
        vocabulary = self.vocabulary()
        chinese = {token: ident for token, ident in vocabulary.items() if len(token) == 1 and is_chinese(token)}
        self._marked_token = {ident: vocabulary.get("##" + token, ident) for token, ident in chinese.items()}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        # Not `encode_batch_fast`, because `_mark` needs the places of the tokens.
        encoded = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [self._mark(text, encoding) for text, encoding in zip(texts, encoded)]

    def _mark(self, text: str, encoding: Any) -> list[int]:
        ids: list[int] = list(encoding.ids)
        if self._marked_token.keys().isdisjoint(ids):
            return ids
        inner = bytearray(len(text))
        place = 0
        for word in chain.from_iterable(map(self._cut, _STRETCHES.findall(text))):
            if len(word) > 1 and all(map(is_chinese, word)):
                inner[place + 1 : place + len(word)] = b"\1" * (len(word) - 1)
            place += len(word)
        for number, (start, _) in enumerate(encoding.offsets):
            if inner[start]:
                ids[number] = self._marked_token.get(ids[number], ids[number])
        return ids


def is_chinese(character: str) -> bool:
    """Whether a character is a common Chinese one, U+4E00 to U+9FA5, as in LiBai."""
    return "\u4e00" <= character <= "\u9fa5"
