"""Fill-in-the-middle: the parts of each document are all there, in the order of PSM or SPM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.data.datasets import GPTDataset
from libai_data.data.transforms.fill_in_the_middle import FillInTheMiddle
from libai_data.errors import ConfigError, SchemaError
from libai_data.structures import DistTensorData, Instance
from tests.data.datasets.gpt_corpora import write

PRE, MID, SUF, EOD = 1, 2, 3, 4
FIRST = 10


def sample_of(tokens: list[int]) -> Instance:
    array = np.array(tokens)
    return Instance(input_ids=DistTensorData(array[:-1]), labels=DistTensorData(array[1:], placement_idx=-1))


def tokens_of(sample: Instance) -> list[int]:
    fields = sample.get_fields()
    return [*fields["input_ids"].tensor.tolist(), fields["labels"].tensor[-1].item()]


def restored(document: list[int]) -> tuple[list[int], str]:
    """A document before it was changed, and how it was."""
    if not document or document[0] != PRE:
        return document, "plain"
    middle, suffix = document.index(MID), document.index(SUF)
    end = document[-1:] if document[-1] == EOD else []
    behind = document[middle + 1 : len(document) - len(end)]
    if suffix == 1:
        # SPM, or PSM without a prefix: both have the same tokens.
        return [*behind, *document[2:middle], *end], "either"
    return [*document[1:suffix], *behind, *document[suffix + 1 : middle], *end], "psm"


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 99),
)
def test_every_document_can_be_put_together_again(sizes: list[int], rate: float, spm: float, seed: int) -> None:
    ends = np.cumsum([0, *sizes]) + FIRST
    documents = [[*range(start, stop), EOD] for start, stop in zip(ends, ends[1:])]
    # Room for what is added, so that nothing is cut off.
    padding = [9] * (3 * len(documents) + 3)
    tokens = [token for document in documents for token in document] + padding
    function = FillInTheMiddle(PRE, MID, SUF, EOD, rate, spm)
    changed = function(sample_of(tokens), np.random.default_rng(seed))
    found = tokens_of(changed)
    assert len(found) == len(tokens)
    split: list[list[int]] = [[]]
    for token in found:
        split[-1].append(token)
        if token == EOD:
            split.append([])
    kinds = []
    for document, expected in zip(split, documents):
        body, kind = restored(document)
        assert body == expected
        kinds.append(kind)
    if rate == 0:
        assert found == tokens
    if rate == 1:
        assert [kind == "plain" for kind in kinds] == [size < 3 for size in sizes]
    assert spm < 1 or "psm" not in kinds
    assert changed.get_fields()["labels"].placement_idx == -1


def test_rates_hold_and_cuts_are_spread_evenly() -> None:
    function = FillInTheMiddle(PRE, MID, SUF, None, rate=0.6, spm_rate=0.25)
    random = np.random.default_rng(0)
    tokens = [*range(FIRST, FIRST + 100)]
    found = [tokens_of(function(sample_of(tokens), random)) for _ in range(4000)]
    changed = [row for row in found if row[0] == PRE]
    assert abs(len(changed) / 4000 - 0.6) < 0.025
    # Nothing but tokens of the end is left out, and no sample lacks a part.
    assert all({PRE, MID, SUF} <= set(row) and len(row) == 100 and len(set(row)) == 100 for row in changed)
    assert all(max(row) == FIRST + 96 for row in changed)
    psm = [row for row in changed if row[1] != SUF]
    assert abs(len(psm) / len(changed) - 0.75) < 0.03
    lengths = [row.index(SUF) - 1 for row in psm]
    # The smaller of two even draws: a third on average.
    assert abs(np.mean(lengths) / 100 - 1 / 3) < 0.02


def test_fields_that_speak_of_places_and_tokens_that_are_the_same_are_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[*range(20, 60)]])
    function = FillInTheMiddle(PRE, MID, SUF)
    with pytest.raises(SchemaError, match="leave out the options of GPTDataset"):
        function(GPTDataset(prefix, 8, reset_position_ids=True)[0], np.random.default_rng(0))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"suffix_id": PRE}, "all must differ"),
        ({"rate": 1.5}, "rate is 1.5"),
        ({"eod_id": -1}, "eod_id is -1"),
    ]
    for changes, words in wrong:
        with pytest.raises(ConfigError, match=words):
            FillInTheMiddle(**{"prefix_id": PRE, "middle_id": MID, "suffix_id": SUF, **changes})
