"""Fill-in-the-middle: documents of GPT samples in another order, so that a model learns to fill gaps.

Source: M. Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (2022), section 3: at the
level of the context; PSM, and SPM in its joint variant.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from libai_data.data.items import array_in, laid_out_like, named
from libai_data.errors import ConfigError, SchemaError
from libai_data.errors.argument_rules import check_types, or_none, real, whole
from libai_data.mesh.arrays import as_array
from libai_data.structures import Instance

_ADDED = 3
_LEAST = 3  # fewest tokens of a document that is cut into three parts
_FIELDS = {"input_ids", "labels"}
_RULES = {
    **dict.fromkeys(("prefix_id", "middle_id", "suffix_id"), whole(0)),
    "eod_id": or_none(whole(0)),
    **dict.fromkeys(("rate", "spm_rate"), real(0, 1)),
}


class FillInTheMiddle:
    """A function for `RandomMap` that cuts documents of GPT samples into three parts, and moves the middle to the end.

    A document, or its part in a sample, becomes "<prefix> prefix <suffix> suffix <middle> middle" (PSM), or
    "<prefix> <suffix> suffix <middle> prefix middle" (SPM). Both cuts are uniform. Each document that changes makes
    a sample three tokens longer, so the sample first drops three tokens at its end.

    Args:
        prefix_id, middle_id, suffix_id: the tokens before each part.
        eod_id: the token that ends documents, and stays at their end; None if a sample is one document.
        rate: probability that a document changes.
        spm_rate: probability that such a document becomes SPM instead of PSM.

    Raises:
        ConfigError: A probability is out of range, or two of the tokens are the same.
    """

    def __init__(
        self,
        prefix_id: int,
        middle_id: int,
        suffix_id: int,
        eod_id: int | None = None,
        rate: float = 0.5,
        spm_rate: float = 0.5,
    ) -> None:
        check_types(FillInTheMiddle, locals(), _RULES)
        ids = [ident for ident in (prefix_id, middle_id, suffix_id, eod_id) if ident is not None]
        if len(set(ids)) < len(ids):
            raise ConfigError(
                f"the tokens of prefix, middle and suffix and the end of documents are {ids}; all must differ"
            )
        self._prefix, self._middle, self._suffix = ([ident] for ident in (prefix_id, middle_id, suffix_id))
        self._eod_id, self._rate, self._spm_rate = eod_id, rate, spm_rate

    def __call__(self, sample: Any, random: np.random.Generator) -> Instance:
        """A sample with some of its documents changed.

        Args:
            sample: `input_ids` and `labels`, int64 [n] each, the labels being the next tokens.
            random: the generator of all draws.

        Raises:
            SchemaError: The sample has other fields.
        """
        fields = named(sample)
        if set(fields) != _FIELDS:
            raise SchemaError(
                f"a sample has the fields {list(fields)}; FillInTheMiddle moves tokens, and can change only "
                f"{sorted(_FIELDS)}: leave out the options of GPTDataset that add other fields"
            )
        inputs, labels = (as_array(array_in(fields[name]), name) for name in ("input_ids", "labels"))
        tokens = np.append(inputs, labels[-1:])
        ends = [] if self._eod_id is None else (np.flatnonzero(tokens == self._eod_id) + 1).tolist()
        bounds = [0, *ends, *([len(tokens)] if not ends or ends[-1] < len(tokens) else [])]
        changed = tokens.copy()
        place = 0
        for start, stop in zip(bounds, bounds[1:]):
            document = self._changed(tokens[start:stop], len(tokens) - place, random)
            changed[place : place + len(document)] = document
            place += len(document)
        shifted = {"input_ids": changed[:-1], "labels": changed[1:]}
        return Instance(**{name: laid_out_like(array, fields[name]) for name, array in shifted.items()})

    def _changed(self, document: np.ndarray, room: int, random: np.random.Generator) -> np.ndarray:
        """A document of at most `room` tokens, changed or not."""
        # Each document draws four numbers, so that the draws of the next one do not depend on whether it changes.
        change, kind, first, second = random.random(4)
        kept = document[: max(0, room - _ADDED)]
        has_end = len(kept) > 0 and kept[-1] == self._eod_id
        body, end = (kept[:-1], kept[-1:]) if has_end else (kept, kept[:0])
        if len(body) < _LEAST or change >= self._rate:
            return document[:room]
        low, high = sorted(int(place * (len(body) + 1)) for place in (first, second))
        prefix, middle, suffix = body[:low], body[low:high], body[high:]
        if kind < self._spm_rate:
            parts = [self._prefix, self._suffix, suffix, self._middle, prefix, middle]
        else:
            parts = [self._prefix, prefix, self._suffix, suffix, self._middle, middle]
        return np.concatenate([*parts, end]).astype(document.dtype)
