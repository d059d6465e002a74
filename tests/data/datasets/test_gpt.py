"""GPTDataset: nothing lost, nothing twice; masks and positions against implementations of their definitions."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from libai_data.data.datasets import gpt_batch
from libai_data.data.datasets.gpt import GPTDataset
from libai_data.data.datasets.gpt_batch import BatchFiller
from libai_data.data.samplers import CyclicSampler
from libai_data.data.sources import IndexedSource
from libai_data.errors import ConfigError
from libai_data.loader.schema import TensorPart
from tests.data.datasets.gpt_corpora import Documents, corpora, sample_of, samples, write
from tests.loader.streams import loading, stream
from tests.properties import in_one_folder, slowly

EVERYTHING: dict[str, Any] = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
WHOLE = ("cu_seqlens", "max_seqlen")
SOME = in_one_folder(60)


def stream_of(found: list[dict[str, np.ndarray]]) -> list[int]:
    """The stream that padded samples are cut from."""
    first = found[0]["input_ids"][:1].tolist()
    return first + [token for sample in found for token, counts in zip(sample["labels"], sample["loss_mask"]) if counts]


@SOME
@given(documents=corpora(), length=st.integers(1, 9), epochs=st.integers(1, 3), shuffled=st.booleans())
def test_an_epochs_samples_hold_each_document_token_for_token(
    tmp_path: Path, documents: Documents, length: int, epochs: int, shuffled: bool
) -> None:
    assume(epochs * sum(map(len, documents)) > 1)
    prefix = write(tmp_path / "a", documents)
    options: dict[str, Any] = {"num_epochs": epochs, "shuffle_documents": shuffled}
    found = samples(GPTDataset(prefix, length, pad_last=True, **options))
    stream = stream_of(found)
    kept = [document for document in documents if document]
    tokens = sum(map(len, kept))
    assert len(stream) == epochs * tokens
    for epoch in range(epochs):
        own = stream[epoch * tokens : (epoch + 1) * tokens]
        if not shuffled:
            assert own == [token for document in kept for token in document]
        by_first = {document[0]: document for document in kept}
        order = []
        while own:
            order.append(own[0])
            document = by_first.pop(own[0])
            assert own[: len(document)] == document
            own = own[len(document) :]
        assert not by_first
    for sample in found:
        counts = int(sample["loss_mask"].sum())
        assert sample["input_ids"][1:counts].tolist() == sample["labels"][: counts - 1].tolist()
    # Without padding the tail alone is missing.
    whole = (len(stream) - 1) // length
    if whole:
        for sample, padded in zip(samples(GPTDataset(prefix, length, **options)), found[:whole]):
            assert set(sample) == {"input_ids", "labels"}
            assert all((sample[name] == padded[name]).all() for name in sample)


def test_each_epoch_has_an_order_of_its_own_and_the_seed_decides_it(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[number] for number in range(1, 101)])

    def stream(**options: Any) -> list[int]:
        return stream_of(samples(GPTDataset(prefix, 9, pad_last=True, shuffle_documents=True, **options)))

    two = stream(num_epochs=2)
    assert sorted(two[:100]) == sorted(two[100:]) == list(range(1, 101))
    assert two[:100] != two[100:]
    assert stream(seed=7) != stream(seed=8)
    assert stream(seed=7) == stream(seed=7)


def test_the_order_of_documents_stays_the_same_in_all_versions(tmp_path: Path) -> None:
    # Whoever changes this answer raises INDEX_VERSION: saved states would continue elsewhere.
    prefix = write(tmp_path / "a", [[number] for number in range(1, 13)])
    options: dict[str, Any] = {"shuffle_documents": True, "num_epochs": 2, "seed": 7}
    stream = stream_of(samples(GPTDataset(prefix, 5, pad_last=True, **options)))
    assert stream[:12] == [10, 6, 4, 8, 3, 11, 7, 2, 5, 1, 9, 12]
    assert stream[12:] == [1, 8, 6, 5, 12, 3, 7, 2, 4, 11, 9, 10]


def fields_by_definition(stream: list[int], ends: list[bool], begin: int, length: int) -> dict[str, Any]:
    """Positions and masks of a sample, place by place, from where documents end."""
    positions, allowed, counts, since = [], np.zeros((length, length), bool), [], 0
    for place in range(length):
        if place and ends[begin + place - 1]:
            since = place
        positions.append(place - since)
        allowed[place, since : place + 1] = True
        counts.append(0.0 if ends[begin + place] else 1.0)
    return {
        "input_ids": stream[begin : begin + length],
        "labels": stream[begin + 1 : begin + length + 1],
        "position_ids": positions,
        "attention_mask": allowed,
        "loss_mask": counts,
    }


@SOME
@given(documents=corpora(), length=st.integers(1, 9), epochs=st.integers(1, 2))
def test_resets_at_the_ends_of_documents_are_what_they_are_defined_as(
    tmp_path: Path, documents: Documents, length: int, epochs: int
) -> None:
    assume(epochs * sum(map(len, documents)) > length)
    dataset = GPTDataset(write(tmp_path / "a", documents), length, num_epochs=epochs, **EVERYTHING)
    stream = [token for document in documents for token in document] * epochs
    ends = [place == len(document) - 1 for document in documents for place in range(len(document))] * epochs
    for number, sample in enumerate(samples(dataset)):
        expected = fields_by_definition(stream, ends, number * length, length)
        assert sorted(sample) == sorted(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(sample[name], values, err_msg=name)


@SOME
@given(corpora(10, 14), st.integers(1, 9), st.integers(1, 2), st.booleans(), st.booleans())
def test_packed_samples_hold_whole_documents_and_cu_seqlens_says_where(
    tmp_path: Path, documents: Documents, length: int, epochs: int, shuffled: bool, masks_ends: bool
) -> None:
    assume(any(len(document) > 1 for document in documents))
    prefix = write(tmp_path / "a", documents)
    options: dict[str, Any] = {"num_epochs": epochs, "shuffle_documents": shuffled, "eod_mask_loss": masks_ends}
    dataset = GPTDataset(prefix, length, packing=True, pad_id=9, **options)
    pieces: list[int] = []
    inputs: list[int] = []
    labels: list[int] = []
    fills = []
    for sample in samples(dataset):
        bounds = sample["cu_seqlens"].tolist()
        used = bounds[-1]
        assert len(bounds) == length + 1 and bounds[0] == 0 and bounds == sorted(bounds) and used <= length
        assert sample["loss_mask"].tolist() == [1.0] * used + [0.0] * (length - used)
        for name in ("input_ids", "labels"):
            assert (sample[name][used:] == 9).all()
        positions = [place for start, stop in zip(bounds[:-1], bounds[1:]) for place in range(stop - start)]
        assert sample["position_ids"].tolist() == positions + [0] * (length - used)
        own = [stop - start for start, stop in zip(bounds[:-1], bounds[1:]) if stop > start]
        assert sample["max_seqlen"] == max(own)
        fills.append(used)
        pieces += own
        inputs += sample["input_ids"][:used].tolist()
        labels += sample["labels"][:used].tolist()
    # Every token of a document of two or more is predicted once an epoch, from the one before it.
    expected = [pair for document in documents for pair in zip(document, document[1:])] * epochs
    assert sorted(zip(inputs, labels)) == sorted(expected)
    # Only documents that are too long are cut, and into as few pieces as can be.
    cut = [min(length, len(run) - 1 - at) for run in documents for at in range(0, len(run) - 1, length)] * epochs
    assert sorted(pieces) == sorted(cut)
    # No two samples would fit into one.
    least = sorted(fills)
    assert len(least) < 2 or least[0] + least[1] > length


@SOME
@given(documents=corpora(), length=st.integers(1, 9), epochs=st.integers(1, 2), shuffled=st.booleans())
def test_cu_seqlens_of_the_stream_says_what_the_attention_mask_says(
    tmp_path: Path, documents: Documents, length: int, epochs: int, shuffled: bool
) -> None:
    assume(epochs * sum(map(len, documents)) > 1)
    options: dict[str, Any] = {"num_epochs": epochs, "shuffle_documents": shuffled, "pad_last": True}
    prefix = write(tmp_path / "a", documents)
    dense = samples(GPTDataset(prefix, length, reset_attention_mask=True, **options))
    short = samples(GPTDataset(prefix, length, cu_seqlens=True, **options))
    assert set(short[0]) == {"input_ids", "labels", "loss_mask", "cu_seqlens", "max_seqlen"}
    stream = epochs * sum(map(len, documents))
    for number, (one, other) in enumerate(zip(short, dense)):
        assert (one["input_ids"] == other["input_ids"]).all()
        bounds = one["cu_seqlens"].tolist()
        used = min(length, stream - number * length)
        assert bounds[0] == 0 and bounds == sorted(bounds) and bounds[-1] == used
        assert one["max_seqlen"] == np.diff(bounds).max() and one["max_seqlen"].dtype == np.int32
        seen = np.zeros((length, length), bool)
        for start, stop in zip(bounds, bounds[1:]):
            seen[start:stop, start:stop] = np.tri(stop - start, dtype=bool)
        assert (seen[:used, :used] == other["attention_mask"][:used, :used]).all()


@SOME
@given(data=st.data(), documents=corpora(), packing=st.booleans(), shuffled=st.booleans())
def test_tensor_ranks_that_read_parts_read_what_a_whole_sample_has_there(
    tmp_path: Path, data: st.DataObject, documents: Documents, packing: bool, shuffled: bool
) -> None:
    assume(any(len(document) > 1 for document in documents))
    length, ranks = 8, data.draw(st.sampled_from([2, 4]))
    options = {"packing": True} if packing else {**EVERYTHING, "pad_last": True}
    dataset = GPTDataset(write(tmp_path / "a", documents), length, shuffle_documents=shuffled, num_epochs=2, **options)
    chosen = data.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=5))
    whole = [sample_of(dataset, index) for index in chosen]
    split = [name for name in whole[0] if name not in WHOLE]
    names = data.draw(st.lists(st.sampled_from(split), unique=True))
    for rank in range(ranks):
        own = slice(rank * length // ranks, (rank + 1) * length // ranks)
        parts = {name: (own, *(slice(0, size) for size in whole[0][name].shape[1:])) for name in names}
        wanted = {name: [sample[name][parts.get(name, ...)] for sample in whole] for name in whole[0]}
        out = {name: np.full_like(np.stack(values), 77) for name, values in wanted.items()}
        dataset.read_batch(np.array(chosen), out, parts)
        for name, values in wanted.items():
            np.testing.assert_array_equal(out[name], np.stack(values), err_msg=name)


def test_a_corpus_smaller_than_a_sample_is_refused_padded_or_repeated(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2], [3]])
    with pytest.raises(ConfigError, match=r"3 tokens in 2 documents.*max_seq_length 8.*num_epochs, or set pad_last"):
        GPTDataset(prefix, 8)
    (padded,) = samples(GPTDataset(prefix, 8, pad_last=True))
    assert padded["input_ids"].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert padded["labels"].tolist() == [2, 3, 0, 0, 0, 0, 0, 0]
    assert padded["loss_mask"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    (repeated,) = samples(GPTDataset(prefix, 8, num_epochs=3))
    assert repeated["input_ids"].tolist() == [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("documents", [[], [[]], [[], [5], []]])
@pytest.mark.parametrize("options", [{}, {"packing": True}, {"pad_last": True}, {"shuffle_documents": True}])
def test_a_corpus_in_which_nothing_follows_anything_is_refused(
    tmp_path: Path, documents: Documents, options: dict[str, bool]
) -> None:
    with pytest.raises(ConfigError, match="make no sample"):
        GPTDataset(write(tmp_path / "a", documents), 4, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seq_length": 0}, "max_seq_length is 0"),
        ({"num_epochs": 0}, "num_epochs is 0"),
        ({"packing": True, "reset_attention_mask": True}, "exclude each other"),
        ({"cu_seqlens": True, "reset_attention_mask": True}, "exclude each other"),
        ({"pad_id": -1}, r"pad_id is -1, which does not fit the tokens of .* \(uint16\)"),
    ],
)
def test_arguments_out_of_range_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3]])
    with pytest.raises(ConfigError, match=message):
        GPTDataset(prefix, **{"max_seq_length": 2, **options})


def test_labels_are_for_the_last_stage_and_all_dtypes_become_int64(tmp_path: Path) -> None:
    for dtype in (np.uint8, np.uint16, np.int32, np.int64):
        sample = GPTDataset(write(tmp_path / np.dtype(dtype).name, [[1, 2, 3]], dtype), 2)[0]
        assert (sample.input_ids.placement_idx, sample.labels.placement_idx) == (0, -1)
        assert sample.input_ids.tensor.dtype == sample.labels.tensor.dtype == np.int64


@pytest.mark.parametrize("options", [{}, *map(slowly, ({"shuffle_documents": True}, {"packing": True})), EVERYTHING])
def test_workers_map_the_files_and_read_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 5000, size).tolist() for size in rng.integers(0, 90, 300)]
    dataset = GPTDataset(IndexedSource(write(tmp_path / "a", documents)), 32, num_epochs=2, **options)
    dataset.read_batch(np.arange(3), {"input_ids": np.empty((3, 32), np.int64)})
    assert len(pickle.dumps(GPTDataset(tmp_path / "a", 32))) < 3000

    alone, by_workers = (
        stream(dataset, CyclicSampler(dataset, 16, shuffle=True), 6, num_workers=workers) for workers in (0, 2)
    )
    assert by_workers == alone


@pytest.mark.parametrize("options", [{}, {"packing": True}, {"reset_position_ids": True, "pad_last": True}])
def test_with_split_1_a_loader_gives_a_tensor_rank_its_tokens_and_cu_seqlens_stays_whole(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 5000, size).tolist() for size in rng.integers(0, 40, 100)]
    dataset = GPTDataset(write(tmp_path / "a", documents), 32, **options)
    names = [name for name in sample_of(dataset, 0) if name not in WHOLE]
    layouts = {name: {"sbp_list": ["split_0", "split_1"]} for name in names}
    for rank in range(2):
        sampler = CyclicSampler(dataset, 8, shuffle=True)
        with loading(dataset, sampler, layouts=layouts, tensor_part=TensorPart(rank, 2)) as loader:
            indices = loader.stream.batch_at(0).indices.tolist()
            batch = next(iter(loader)).get_fields()
        own = slice(16 * rank, 16 * rank + 16)
        for row, index in enumerate(indices):
            for name, whole in sample_of(dataset, index).items():
                expected = whole if name in WHOLE else whole[own]
                np.testing.assert_array_equal(batch[name].tensor.numpy()[row], expected, err_msg=name)


def test_a_tensor_rank_takes_no_more_than_its_tokens_from_the_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = GPTDataset(write(tmp_path / "a", [list(range(500))]), 64)
    widths: list[int] = []
    take = BatchFiller._tokens_from

    def recorded(self: BatchFiller, offsets: np.ndarray, width: int) -> np.ndarray:
        widths.append(width)
        return take(self, offsets, width)

    monkeypatch.setattr(BatchFiller, "_tokens_from", recorded)
    own = (slice(16, 32),)
    out = {name: np.empty((2, 16), np.int64) for name in ("input_ids", "labels")}
    dataset.read_batch(np.array([3, 0]), out, {"input_ids": own, "labels": own})
    assert widths == [17]  # and the one that its last label is
    assert out["input_ids"].tolist() == [list(range(208, 224)), list(range(16, 32))]
    assert out["labels"].tolist() == [list(range(209, 225)), list(range(17, 33))]


KINDS: dict[str, dict[str, Any]] = {
    "shuffled": {"shuffle_documents": True},
    "padded": {"shuffle_documents": True, "pad_last": True},
    "reset": {"reset_position_ids": True, "eod_mask_loss": True},
    "packed": {"packing": True},
    "bounds": {"cu_seqlens": True, "shuffle_documents": True},
}


@in_one_folder(80)
@given(
    documents=corpora(10, 14),
    length=st.integers(1, 9),
    epochs=st.integers(1, 3),
    kind=st.sampled_from(sorted(KINDS)),
    low=st.integers(0, 4),
    seed=st.integers(0, 9),
)
def test_tokens_copied_in_slices_are_those_found_one_by_one(
    tmp_path: Path, documents: Documents, length: int, epochs: int, kind: str, low: int, seed: int
) -> None:
    assume(epochs * sum(max(len(document) - 1, 0) for document in documents) > length)
    dataset = GPTDataset(write(tmp_path / "a", documents), length, num_epochs=epochs, **KINDS[kind])
    indices = np.random.default_rng(seed).integers(0, len(dataset), 4)
    own = slice(min(low, length - 1), length)
    found = []
    for tokens_a_slice in (1, 1 << 30):
        rows = sample_of(dataset, 0)
        parts = {name: (own,) for name in rows if name not in WHOLE}
        out = {
            name: np.empty((4, *(array.shape if name in WHOLE else (own.stop - own.start,))), array.dtype)
            for name, array in rows.items()
        }
        with mock.patch.object(gpt_batch, "_TOKENS_A_SLICE", tokens_a_slice):
            dataset.read_batch(indices, out, parts)
        found.append(out)
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name], err_msg=name)
