"""Which sentences make a sample: runs of sentences of one document that fill it, found for all documents at once."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from libai_data.errors import ConfigError
from libai_data.data.files.identity import key_of
from libai_data.data.files.index_cache import cached_arrays
from libai_data.data.random.hashing import combine64, mix64_array
from libai_data.data.sources.indexed import IndexedSource
from libai_data.data.sources.record_index import index_folder

logger = logging.getLogger(__name__)

_VERSION = 1
_OPEN_INTERVAL = 2.0**-53


@dataclass(frozen=True)
class SentenceRule:
    """How sentences are put together, as in LiBai and Megatron-LM.

    A sample takes sentences until it has `max_tokens`, and `min_sentences`; rather than leave the document's last
    sentence alone, it takes that too.

    Args:
        max_tokens: of a sample, without special tokens; what is more is cut off when the sample is read.
        min_sentences: of a sample; shorter documents are left out.
        short_seq_prob: share of samples that aim at a length drawn evenly from 2 to `max_tokens`.
        seed: decides which these are.
        max_num_samples: the corpus is repeated, with other short samples, until there are so many; None for once.

    Raises:
        ConfigError: A number is out of range.
    """

    max_tokens: int
    min_sentences: int
    short_seq_prob: float = 0.0
    seed: int = 1234
    max_num_samples: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ConfigError(
                f"max_seq_length leaves room for {self.max_tokens} tokens beside the special ones; at least 2"
            )
        if not 0 <= self.short_seq_prob <= 1:
            raise ConfigError(f"short_seq_prob is {self.short_seq_prob}; a probability lies within 0 and 1")
        if self.max_num_samples is not None and self.max_num_samples < 1:
            raise ConfigError(f"max_num_samples is {self.max_num_samples}; give at least 1, or None for one epoch")


class SentenceSamples(NamedTuple):
    """Samples in the order of the corpus.

    Args:
        first: int64 [samples], the first sentence of each.
        stop: int64 [samples], the sentence behind its last.
        start: int64 [samples], the place of its first token among all tokens.
        target: int64 [samples], how many tokens it may have.
    """

    first: np.ndarray
    stop: np.ndarray
    start: np.ndarray
    target: np.ndarray


def sentence_samples(source: IndexedSource, rule: SentenceRule, cache_dir: str | Path | None) -> SentenceSamples:
    """The samples of a corpus, from a file if they have been found before.

    Args:
        source: of which each sequence is a sentence.
        rule: how they are put together.
        cache_dir: folder for the file; by default `<prefix>.cache`; see `record_index.index_folder`.

    Raises:
        ConfigError: No document has enough sentences.
    """
    depends_on = {"version": _VERSION, "corpus": source.fingerprint, **asdict(rule)}
    key = key_of(json.dumps(depends_on, sort_keys=True))
    name = f"sentences-{key}"
    folder = index_folder(cache_dir, Path(f"{source.prefix}.cache"), name)
    return SentenceSamples(*cached_arrays(folder, name, lambda: list(find_samples(source, rule))))


def find_samples(source: Any, rule: SentenceRule) -> SentenceSamples:
    """The samples of a corpus; see `sentence_samples`.

    Args:
        source: has `sizes`, tokens of each sentence, and `doc_idx`, the first sentence of each document.
        rule: how sentences are put together.
    """
    sizes, documents = np.asarray(source.sizes), np.asarray(source.doc_idx)
    places = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=places[1:])
    lengths = np.diff(documents)
    kept = lengths >= rule.min_sentences
    if not kept.any():
        raise ConfigError(
            f"none of the {len(lengths)} documents has {rule.min_sentences} sentence(s), which a sample needs; "
            "preprocess the corpus with --split-sentences"
        )
    if not kept.all():
        logger.warning("%d of %d documents are left out: they have too few sentences.", (~kept).sum(), len(kept))
    epochs: list[SentenceSamples] = []
    count = 0
    while not epochs or (rule.max_num_samples is not None and count < rule.max_num_samples):
        epochs.append(_one_epoch(places, documents[:-1][kept], documents[1:][kept], rule, len(epochs)))
        count += len(epochs[-1].first)
    found = SentenceSamples(*(np.concatenate(arrays)[: rule.max_num_samples] for arrays in zip(*epochs)))
    _tell_what_is_cut(places, found)
    return found


def _one_epoch(
    places: np.ndarray, firsts: np.ndarray, stops: np.ndarray, rule: SentenceRule, epoch: int
) -> SentenceSamples:
    count = len(places) - 1
    targets = _targets(count, rule, epoch)
    # Where a sample would end that begins with some sentence, for each sentence; `ends` of its own document.
    ends = np.full(count, count, np.int64)
    ends[firsts] = stops
    ends = _carried(ends, firsts, stops)
    stop = np.searchsorted(places, places[:-1] + targets).astype(np.int64)
    np.maximum(stop, np.arange(count) + rule.min_sentences, out=stop)
    # The document's last sentence is not left alone.
    stop = np.where(stop >= ends - 1, ends, stop)
    # The next sample begins there; behind a document's end there is none. After all 2^k samples from each document's
    # beginning on are known, a jump over 2^k samples gives as many more.
    jump = np.append(np.where(stop >= ends, count, stop), count)
    starts, last = firsts, jump
    while True:
        further = last[starts]
        further = further[further < count]
        if not len(further):
            break
        starts = np.concatenate([starts, further])
        last = last[last]
    starts = np.sort(starts)
    return SentenceSamples(starts, stop[starts], places[starts], targets[starts])


def _carried(ends: np.ndarray, firsts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """For each sentence of a document the document's end."""
    lengths = stops - firsts
    inside = (
        np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths) + np.repeat(firsts, lengths)
    )
    ends[inside] = np.repeat(stops, lengths)
    return ends


def _targets(count: int, rule: SentenceRule, epoch: int) -> np.ndarray:
    """How long a sample is to be that begins with some sentence."""
    targets = np.full(count, rule.max_tokens, np.int64)
    if rule.short_seq_prob:
        key = combine64(_VERSION, rule.seed, epoch)
        drawn = mix64_array(mix64_array(np.arange(count, dtype=np.uint64) + np.uint64(key)))
        short = (drawn >> np.uint64(11)) * _OPEN_INTERVAL < rule.short_seq_prob
        lengths = 2 + mix64_array(drawn[short]) % np.uint64(rule.max_tokens - 1)
        targets[short] = lengths.astype(np.int64)
    return targets


def _tell_what_is_cut(places: np.ndarray, samples: SentenceSamples) -> None:
    tokens = places[samples.stop] - samples.start
    cut = int(np.maximum(tokens - samples.target, 0).sum())
    total = int(tokens.sum())
    if cut > total // 10:
        logger.warning("%.0f %% of the tokens are cut off, since sentences are long beside samples.", 100 * cut / total)
