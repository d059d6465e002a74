"""Samples of several sentences of one document, for pairs of passages; computed for all documents at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import numpy as np

from libai_data.data.random.hashing import combine64, mix64_array
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import check, check_types, or_none, real, whole

logger = logging.getLogger(__name__)

_VERSION = 1
_OPEN_INTERVAL = 2.0**-53

_RULES = {
    "max_seq_length": whole(-(1 << 62), 1 << 22),
    "max_num_samples": or_none(whole(1, 1 << 40)),
    "short_seq_prob": real(0, 1),
}


@dataclass(frozen=True)
class SentenceRule:
    """How sentences are joined to samples, as in LiBai and Megatron-LM.

    Sentences are added to a sample for pairs until it has `max_tokens` and `min_sentences`. If only the document's last
    sentence would be left, it is added too. For samples of one sentence or more, see `passage_index`.
    """

    max_tokens: int  # tokens of a sample, without special tokens; more are cut off when the sample is read
    min_sentences: int  # sentences of a sample; shorter documents are left out. Empty sentences do not count.
    short_seq_prob: float = 0.0  # share of samples whose target length is drawn evenly from 2 to `max_tokens`
    seed: int = 1234  # decides which samples are short
    # The corpus is repeated, with other short samples, until there are so many samples; None: use the corpus once.
    max_num_samples: int | None = None

    def __post_init__(self) -> None:
        check_types(type(self), vars(self))
        for name in ("max_tokens", "seed", "max_num_samples"):
            if getattr(self, name) is not None:  # JSON cannot store numpy numbers
                object.__setattr__(self, name, int(getattr(self, name)))
        check(
            _RULES,
            max_seq_length=self.max_tokens + 2,
            max_num_samples=self.max_num_samples,
            short_seq_prob=self.short_seq_prob,
        )
        if self.max_tokens < 2:
            raise ConfigError(
                f"max_seq_length leaves room for {self.max_tokens} tokens beside the special ones; 2 are needed"
            )


class SentenceSamples(NamedTuple):
    """Samples in the order of the corpus."""

    first: np.ndarray  # int64 [samples], the first sentence of each sample
    stop: np.ndarray  # int64 [samples], the sentence after its last sentence
    start: np.ndarray  # int64 [samples], the place of its first token in the corpus
    target: np.ndarray  # int64 [samples], its largest number of tokens
    used: np.ndarray  # int64 [1], tokens in all samples; a token in two samples counts twice


def find_samples(source: Any, rule: SentenceRule) -> SentenceSamples:
    """The samples of a corpus, which has `sizes`, tokens of each sentence, and `doc_idx`, the first sentence of each
    document. A ConfigError if no document has enough sentences."""
    sizes = np.asarray(source.sizes)
    full = np.flatnonzero(sizes)
    documents = np.searchsorted(full, source.doc_idx)
    places = np.zeros(len(full) + 1, np.int64)
    np.cumsum(sizes[full], out=places[1:])
    lengths = np.diff(documents)
    kept = lengths >= rule.min_sentences
    if not kept.any():
        raise ConfigError(
            f"none of the {len(lengths)} documents has {rule.min_sentences} sentence(s), which a sample needs; "
            "preprocess the corpus with --split-sentences"
        )
    if not kept.all():
        logger.warning("%d of %d documents are skipped: they have too few sentences.", (~kept).sum(), len(kept))
    firsts, ends = documents[:-1][kept], np.repeat(documents[1:], lengths)
    first, stop, start, target = repeated(lambda epoch: _one_epoch(places, firsts, ends, rule, epoch), rule)
    used = np.minimum(places[stop] - start, target).sum(keepdims=True)
    return SentenceSamples(full[first], full[stop - 1] + 1, start, target, used)


def repeated(find_epoch: Callable[[int], Sequence[np.ndarray]], rule: SentenceRule) -> list[np.ndarray]:
    """The samples of as many epochs as `rule` needs; `find_epoch(epoch)` returns the arrays [samples] of one epoch."""
    epochs = [find_epoch(0)]
    count = len(epochs[0][0])
    while rule.max_num_samples is not None and count < rule.max_num_samples:
        epochs.append(find_epoch(len(epochs)))
        count += len(epochs[-1][0])
    return [np.concatenate(arrays)[: rule.max_num_samples] for arrays in zip(*epochs)]


def _one_epoch(
    places: np.ndarray, firsts: np.ndarray, ends: np.ndarray, rule: SentenceRule, epoch: int
) -> Sequence[np.ndarray]:
    count = len(places) - 1
    targets = targets_of(np.arange(count), rule, epoch)
    # For each sentence, where a sample that begins with this sentence ends. `ends` is the end of its document.
    stop = np.searchsorted(places, places[:-1] + targets).astype(np.int64)
    np.maximum(stop, np.arange(count) + rule.min_sentences, out=stop)
    # If only the document's last sentence would be left, it is added to the sample.
    stop = np.where(stop >= ends - 1, ends, stop)
    # `jump` leads from a sample's first sentence to the next sample's, or to `count` at the document's end. When the
    # first 2^k samples of each document are known, a jump over 2^k samples gives as many more.
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
    return starts, stop[starts], places[starts], targets[starts]


def targets_of(begins: np.ndarray, rule: SentenceRule, epoch: int) -> np.ndarray:
    """Target lengths of the samples that begin at `begins`, int64 [n]; the random lengths depend on `begins`."""
    targets = np.full(len(begins), rule.max_tokens, np.int64)
    if rule.short_seq_prob:
        key = combine64(_VERSION, rule.seed, epoch)
        drawn = mix64_array(mix64_array(begins.astype(np.uint64) + np.uint64(key)))
        short = (drawn >> np.uint64(11)) * _OPEN_INTERVAL < rule.short_seq_prob
        lengths = 2 + mix64_array(drawn[short]) % np.uint64(rule.max_tokens - 1)
        targets[short] = lengths.astype(np.int64)
    return targets
