"""Streams through filters and packers hold what they must on any mesh, and go on exactly from any half-filled pack."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libai_data import DataLoader
from libai_data.data.datasets import ConcatDataset, FilteredDataset, PackedDataset, cu_seqlens
from libai_data.data.random.substitute import substitute_index
from libai_data.data.samplers import CyclicSampler, LaneOrder, Ledger, Order, SingleRoundSampler, StepSchedule
from libai_data.errors import CheckpointError, ConfigError, SampleError, SchemaError
from libai_data.structures import DistTensorData, Instance, batch_info
from tests.data.samplers.transforms import Documents, Failing, as_tokens, expected_packs, expected_windows, is_even
from tests.loader.streams import WORKER_NAMES, WORKERS, loading, stream
from tests.properties import examples, slowly


class OfLane:
    """The samples of a lane, in order; documents come again every `samples`."""

    def __init__(self, order: Order, turn: int, samples: int) -> None:
        self._order, self._turn, self._samples = order, turn, samples

    def locate(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epochs, indices = self._order.locate(places * self._order.lanes + self._turn)
        return epochs, indices % self._samples


class Case(NamedTuple):
    """A packed stream."""

    lengths: list[int]
    units: int
    cut: bool
    known: bool
    keep: str | None
    window: int | None = None
    lanes: int | None = None

    def dataset(self) -> PackedDataset:
        keep: Any = {
            None: None,
            "function": is_even,
            "bools": [length % 2 == 0 for length in self.lengths],
        }[self.keep]
        lengths = self.lengths if self.known else None
        documents: Any = Documents(self.lengths)
        if self.lanes:
            # Every shard has all lengths, so that each lane has outputs.
            documents = ConcatDataset([documents] * 2 * self.lanes)
            documents.shard_lengths = np.full(2 * self.lanes, len(self.lengths))
            lengths = None if lengths is None else lengths * 2 * self.lanes
            keep = keep * 2 * self.lanes if isinstance(keep, list) else keep
        return PackedDataset(documents, self.units, cut=self.cut, lengths=lengths, keep=keep, window=self.window)

    def sampler(self, micro: int, rank: int = 0, ranks: int = 1, consumed: int = 0) -> CyclicSampler:
        return CyclicSampler(self.dataset(), micro, True, consumed, rank, ranks, seed=1, lanes=self.lanes)

    def expected(self, count: int) -> list[Any]:
        """The first outputs; in lanes each in turn has one of those of its own samples."""
        order = self.sampler(1).order
        lanes = [islice(self._of_lane(order, turn), count) for turn in range(order.lanes)]
        return [next(lanes[output % order.lanes]) for output in range(count)]

    def _of_lane(self, order: Order, turn: int) -> Iterator[Any]:
        own = OfLane(order, turn, len(self.lengths))
        kept = (lambda index: True) if self.keep is None else (lambda index: self.lengths[index] % 2 == 0)
        if self.window:
            return expected_windows(self.lengths, own, self.units, self.window, kept)
        return expected_packs(self.lengths, own, self.units, self.cut, kept)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    units = draw(st.integers(1, 12))
    cut = draw(st.booleans())
    lengths = draw(st.lists(st.integers(0, 25 if cut else units), min_size=1, max_size=12))
    lengths.append(2 if units > 1 or cut else 1)
    keep = draw(st.sampled_from([None, "function", "bools"])) if lengths[-1] == 2 else None
    window = None if cut else draw(st.sampled_from([0, 1, 4, 7]))
    lanes = draw(st.sampled_from([None, 1, 2, 3, 4]))
    return Case(lengths, units, cut, draw(st.booleans()), keep, window, lanes)


def outputs(sampler: CyclicSampler, batches: int) -> list[Any]:
    indices = [index for batch in islice(iter(sampler), batches) for index in batch]
    return [as_tokens(sampler.dataset[index]) for index in indices]  # type: ignore[index]


def exchange(samplers: Sequence[CyclicSampler]) -> list[Any]:
    """Let the ranks' samplers tell each other what they know, and return their states."""
    starts = [sampler.state.start for sampler in samplers]
    for sampler in samplers:
        for start in starts:
            sampler.note_start(sampler.position, start)
    return [sampler.state_dict() for sampler in samplers]


@settings(max_examples=examples(60))
@given(cases(), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(0, 20))
def test_every_mesh_packs_the_same_and_goes_on_from_any_cut(case: Case, ranks: int, micro: int, cut: int) -> None:
    expected = case.expected(cut + 4 * ranks * micro)
    first = case.sampler(1)
    assert outputs(first, cut) == expected[:cut]
    state = json.loads(json.dumps(first.state_dict()))
    assert len(json.dumps(state)) < 1024 + 64 * first.order.lanes
    parts, samplers = [], [case.sampler(micro, rank, ranks) for rank in range(ranks)]
    for sampler in samplers:
        sampler.exchanges_starts = ranks > 1
        sampler.load_state_dict(state)
        assert sampler.state_dict() == state
        rows = outputs(sampler, 4)
        parts.append([rows[step * micro : (step + 1) * micro] for step in range(4)])
    positions = cut + np.arange(4 * ranks * micro).reshape(4, -1)
    in_rows = first.order.in_rows(positions).ravel().tolist()
    assert [pack for step in zip(*parts) for part in step for pack in part] == [expected[row] for row in in_rows]
    outputs(first, 4 * ranks * micro)
    assert exchange(samplers) == [first.state_dict()] * ranks, "the state is that of one rank"


@settings(max_examples=examples(30))
@given(cases(), st.integers(0, 20))
def test_consumed_samples_lead_to_the_same_place_as_a_state(case: Case, cut: int) -> None:
    told, walked = case.sampler(1), case.sampler(1, consumed=cut)
    outputs(told, cut)
    assert outputs(walked, 2) == outputs(told, 2)
    assert walked.state_dict() == told.state_dict()


def test_restoring_reads_no_more_than_the_next_batch_however_far_the_stream_is() -> None:
    lengths = [5] * 1000
    far = CyclicSampler(PackedDataset(Documents(lengths), 7, lengths=lengths), 10, shuffle=True, consumed_samples=5000)
    next(iter(far))
    documents = Documents(lengths)
    resumed = CyclicSampler(PackedDataset(documents, 7), 10, shuffle=True)
    resumed.load_state_dict(far.state_dict())
    assert next(iter(resumed)) == next(iter(far))
    assert len(documents.reads) <= 24


@pytest.mark.parametrize("options", [{}, {"cut": False}, {"cut": False, "window": 0}])
def test_all_lanes_are_measured_at_once_after_a_restore(options: dict[str, Any]) -> None:
    """numpy calls for each of 64 lanes would take most of the time of a restore."""
    lengths = np.full(64_000, 7)

    def sampler() -> CyclicSampler:
        documents: Any = Documents(lengths.tolist())
        documents.shard_lengths = np.full(640, 100)
        return CyclicSampler(PackedDataset(documents, 16, lengths=lengths, **options), 512, True, lanes=64)

    far = sampler()
    next(iter(far))
    resumed = sampler()
    resumed.load_state_dict(far.state_dict())
    located: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        locate = LaneOrder.locate

        def noted(order: LaneOrder, places: Any) -> Any:
            located.append(1)
            return locate(order, places)

        patch.setattr(LaneOrder, "locate", noted)
        batch = resumed.batch_at(resumed.position)
    assert len(located) <= 2, "once for what the samples yield, and once for where the outputs begin"
    assert batch is not None and batch.indices.tolist() == next(iter(far))


@pytest.mark.parametrize(("known", "length"), [(True, 4096), (False, 4096), (True, 16_384)])
def test_98_percent_of_packed_sequences_are_tokens_on_web_like_lengths(known: bool, length: int) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6.3, 1.2, 4000).astype(np.int64), 1, 4096)
    samples = [{"x": np.zeros(length, np.uint8)} for length in lengths.tolist()]
    packs = PackedDataset(samples, length, cut=False, lengths=lengths if known else None)
    sampler = CyclicSampler(packs, 8, shuffle=True, seed=1)
    rows = [packs[start] for batch in islice(iter(sampler), 60) for start in batch]
    assert np.mean([(row.segment_ids.tensor > 0).mean() for row in rows]) > 0.98
    assert len(json.dumps(sampler.state_dict())) < 1024


def test_a_window_is_read_once_by_whoever_packs_it() -> None:
    documents = Documents([5, 3, 2, 6, 1, 4, 7, 2] * 8)
    packs = PackedDataset(documents, 8, cut=False, window=16)
    sampler = CyclicSampler(packs, 2, shuffle=True, seed=1)
    for batch in islice(iter(sampler), 12):
        for start in batch:
            packs[start]
    assert len(documents.reads) <= 64 and max(documents.reads.count(index) for index in range(64)) == 1
    resumed = PackedDataset(Documents(documents.lengths), 8, cut=False, window=16)
    again = CyclicSampler(resumed, 2, shuffle=True, seed=1)
    again.load_state_dict(sampler.state_dict())
    assert next(iter(again)) == next(iter(sampler))
    assert len(resumed.dataset.reads) <= 32


RANDOM = [3, 9, 1, 14, 0, 6, 2, 8]


def packed(**options: Any) -> PackedDataset:
    return PackedDataset(Documents(RANDOM, random=True), 10, **options)


@pytest.mark.parametrize("options", [*WORKERS[:3], slowly(WORKERS[3])], ids=WORKER_NAMES)
@pytest.mark.parametrize(
    "make",
    [
        packed,
        lambda: packed(cut=False, truncate=True, keep=is_even, window=5),
        slowly(lambda: packed(cut=False, truncate=True, keep=is_even, window=0)),
    ],
)
def test_every_kind_of_worker_packs_the_same_and_goes_on_from_its_middle(options: Any, make: Any) -> None:
    def batches(count: int, state: Any = None, **options: Any) -> list[Any]:
        dataset = make()
        return stream(dataset, CyclicSampler(dataset, 4, shuffle=True, seed=3), count, state, seed=3, **options)

    expected = batches(8)
    assert batches(8, **options) == expected
    dataset = make()
    with loading(dataset, CyclicSampler(dataset, 4, shuffle=True, seed=3), seed=3, **options) as loader:
        for _ in islice(iter(loader), 3):
            pass
        state = json.loads(json.dumps(loader.state_dict()))
    assert len(json.dumps(state)) < 1024
    assert batches(5, state, **options) == expected[3:]
    assert batches(5, state) == expected[3:]


@settings(max_examples=examples(25))
@given(st.lists(st.booleans(), min_size=1, max_size=30).filter(any), st.booleans(), st.integers(0, 40))
def test_a_filter_takes_what_is_kept_in_the_order_of_the_stream(kept: list[bool], known: bool, cut: int) -> None:
    def make() -> FilteredDataset:
        numbers = [{"x": np.array(number)} for number in range(len(kept))]
        return FilteredDataset(numbers, kept if known else lambda sample: kept[int(sample["x"])])

    sampler = CyclicSampler(make(), 2, shuffle=True, seed=5)
    order = sampler.order
    wanted = [index for index in order.locate(np.arange(len(kept) * (2 * cut + 6)))[1].tolist() if kept[index]]
    taken = [sampler.dataset[start] for batch in islice(iter(sampler), cut) for start in batch]  # type: ignore[index]
    resumed = CyclicSampler(make(), 3, shuffle=True, seed=5)
    resumed.load_state_dict(sampler.state_dict())
    taken += [resumed.dataset[start] for start in next(iter(resumed))]  # type: ignore[index]
    assert [int(sample["x"]) for sample in taken] == wanted[: 2 * cut + 3]


def test_steps_may_change_their_size_in_the_middle_of_packs() -> None:
    case = Case([5, 3, 11], 4, True, True, None)
    sampler = case.sampler(2)
    sampler.follow(StepSchedule(((0, 2), (3, 6))))
    assert outputs(sampler, 5) == case.expected(18)
    assert sampler.state.step == 5
    resumed = case.sampler(2)
    resumed.follow(StepSchedule(((0, 2), (3, 6))))
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.state == sampler.state
    assert Ledger(sampler.state).positions_of(4) == range(12, 18)
    for samples in (Ledger(sampler.state).samples_of, lambda step: Ledger(sampler.state).uses_of(0, step)):
        with pytest.raises(CheckpointError, match="depend on the samples' lengths"):
            samples(2)


def test_the_memory_to_find_a_position_does_not_grow_with_it() -> None:
    kept = FilteredDataset(range(1000), np.arange(1000) % 2 == 0)
    sampler = CyclicSampler(kept, 4, consumed_samples=200_000)
    tracemalloc.start()
    batch = sampler.batch_at(sampler.position)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batch is not None and batch.indices.tolist() == [400_000, 400_002, 400_004, 400_006]
    assert peak < 1 << 20


def test_another_seed_or_another_kind_of_stream_is_refused() -> None:
    case = Case([5, 3, 11], 4, True, True, None)
    state = case.sampler(2).state_dict()
    other = CyclicSampler(case.dataset(), 2, shuffle=True, seed=2)
    with pytest.raises(CheckpointError, match="seed was 1 and is now 2; but a stream transform"):
        other.load_state_dict(state, ["seed"])
    with pytest.raises(CheckpointError, match="was that of a stream transform and is now that of samples"):
        CyclicSampler(range(3), 2, shuffle=True, seed=1).load_state_dict(state)


def test_a_state_in_lanes_has_a_beginning_for_each_lane() -> None:
    case = Case([2, 3], 4, True, True, None, lanes=2)
    state = case.sampler(2).state_dict()
    assert state["start"] == [[0, 0], [1, 0]]
    for start in ([0, 0], [[0, 0]], [[1, 0], [0, 0]], []):
        with pytest.raises(CheckpointError, match="start"):
            case.sampler(2).load_state_dict({**state, "start": start})
    with pytest.raises(CheckpointError, match="continues only in the same order"):
        case._replace(lanes=4).sampler(2).load_state_dict(state, ["lanes", "dataset", "drop_last"])
    state = case._replace(lanes=None).sampler(2).state_dict()
    with pytest.raises(CheckpointError, match="start does not fit"):
        case._replace(lanes=None).sampler(2).load_state_dict({**state, "start": [[0, 0]]})


@pytest.mark.parametrize("known", [slowly(True), False])
@pytest.mark.parametrize(
    "options",
    [{}, slowly({"cut": False}), slowly({"keep": [index % 3 > 0 for index in range(160)]}), {"keep": is_even}],
)
def test_ranks_read_their_own_shards_in_lanes(options: dict[str, Any], known: bool) -> None:
    """Also in later epochs, in which the lanes come apart, as their samples have other lengths; and after a resume."""
    lengths = np.random.default_rng(0).integers(1, 9, 160)

    def sampler_of(rank: int, ranks: int) -> CyclicSampler:
        documents: Any = Documents(lengths.tolist())
        documents.shard_lengths = np.full(16, 10)
        packs = PackedDataset(documents, 16, lengths=lengths if known else None, **options)
        sampler = CyclicSampler(packs, 8 // ranks, True, 0, rank, ranks, seed=1, lanes=8, block=2)
        sampler.exchanges_starts = ranks > 1
        return sampler

    state = sampler_of(0, 1).state_dict()
    for ranks in (2, 4, 2):
        samplers = [sampler_of(rank, ranks) for rank in range(ranks)]
        read: list[set[int]] = []
        for sampler in samplers:
            sampler.load_state_dict(state)
            outputs(sampler, 20)
            read.append({index // 10 for index in sampler.dataset.dataset.reads})  # type: ignore[attr-defined]
        assert set.union(*read) == set(range(16))
        assert sum(map(len, read)) < 16 + ranks, "two ranks share a shard only at the ends of their spans"
        state, *others = exchange(samplers)
        assert others == [state] * (ranks - 1)
        assert len(json.dumps(state["start"])) <= 64 * 8


@pytest.mark.parametrize("known", [True, False])
def test_batches_of_another_size_read_lanes_that_a_reader_has_not_followed(known: bool) -> None:
    """By going through their samples from where the state knows them."""
    case = Case([3, 1, 4, 1, 5], 4, True, known, None, lanes=4)
    samplers = [case.sampler(2, rank, 2) for rank in range(2)]
    for sampler in samplers:
        sampler.exchanges_starts = True
        outputs(sampler, 3)
        sampler.follow(StepSchedule(((0, 4), (3, 6))))
    parts = [outputs(sampler, 5) for sampler in samplers]
    rows = [part[step * 3 : (step + 1) * 3] for step in range(5) for part in parts]
    in_rows = samplers[0].order.in_rows(12 + np.arange(30).reshape(5, -1)).ravel().tolist()
    expected = case.expected(42)
    assert [pack for part in rows for pack in part] == [expected[row] for row in in_rows]


@pytest.mark.parametrize("known", [True, False])
def test_a_restored_state_replaces_what_a_reader_knew_of_its_lanes(known: bool) -> None:
    """Also of batches that it has read behind the place of the state."""
    case = Case([3, 1, 4, 1, 5], 4, True, known, None, lanes=4)
    used, fresh = (case.sampler(2, 0, 2) for _ in range(2))
    used.exchanges_starts = fresh.exchanges_starts = True
    outputs(used, 3)
    state = {**fresh.state_dict(), "position": 4}
    for sampler in (used, fresh):
        sampler.load_state_dict(state)
        assert sampler.state_dict() == state
    assert outputs(used, 4) == outputs(fresh, 4)
    assert used.state == fresh.state


def test_other_lengths_of_sequences_are_another_dataset() -> None:
    documents = Documents([5, 3, 11])
    four, five = (PackedDataset(documents, length) for length in (4, 5))
    state = DataLoader(four, CyclicSampler(four, 2)).state_dict()
    with pytest.raises(CheckpointError, match=r"'units': 4.*'units': 5"):
        DataLoader(five, CyclicSampler(five, 2)).load_state_dict(state)


@pytest.mark.parametrize(
    ("lanes", "known", "epochs"), [(1, False, [0, 0, 0, 1, 1]), (2, True, [0, 0, 0, 0, 1]), (2, False, [None] * 5)]
)
def test_a_batch_tells_its_epoch_if_each_mesh_knows_it_and_its_place(
    lanes: int, known: bool, epochs: list[int | None]
) -> None:
    documents: Any = Documents([4] * 6)
    documents.shard_lengths = [3, 3]
    dataset = PackedDataset(documents, 8, lengths=[4] * 6 if known else None)
    loader = DataLoader(dataset, CyclicSampler(dataset, 1, lanes=lanes))
    infos = [info for info in map(batch_info, islice(loader, 5)) if info]
    assert [(info.step, info.position) for info in infos] == [(step, step) for step in range(5)]
    assert [info.epoch for info in infos] == epochs


@pytest.mark.parametrize("layout", ["split", "joined"])
def test_layouts_dtypes_and_padding_are_as_told(layout: str) -> None:
    sbp = ["split_0", "split_1"] if layout == "split" else ["split_0", "broadcast"]
    samples = [
        Instance(
            ids=DistTensorData(np.arange(3, dtype=np.int32), sbp), loss=DistTensorData(np.ones(3), placement_idx=-1)
        )
    ]
    dataset = PackedDataset(samples, 8, cut=False, padding={"ids": -1})
    pack = dataset[CyclicSampler(dataset, 1).batch_at(0).indices[0]]  # type: ignore[union-attr]
    assert pack.ids.tensor.dtype == np.int32
    assert pack.ids.tensor.tolist() == [0, 1, 2, 0, 1, 2, -1, -1]
    assert pack.loss.tensor.tolist() == [1] * 6 + [0] * 2
    assert (pack.ids.sbp_list, pack.loss.placement_idx, pack.segment_ids.sbp_list) == (sbp, -1, sbp)
    assert pack.segment_ids.tensor.tolist() == [1, 1, 1, 2, 2, 2, 0, 0]
    assert pack.position_ids.tensor.tolist() == [0, 1, 2, 0, 1, 2, 0, 0]


@pytest.mark.parametrize("padding", [0.5, [0.5], np.array(0.5), np.array([2**40]), "x"])
def test_a_padding_that_the_dtype_of_a_packed_field_cannot_hold_is_refused(padding: Any) -> None:
    dataset = PackedDataset([{"x": np.arange(3, dtype=np.int32)}], 8, cut=False, padding={"x": padding})
    start = CyclicSampler(dataset, 1).batch_at(0).indices[0]  # type: ignore[union-attr]
    with pytest.raises(SchemaError, match=r"field 'x' is padded with .*, which its dtype int32 cannot hold"):
        dataset[start]


def test_segments_become_their_bounds() -> None:
    assert cu_seqlens(np.array([1, 1, 2, 0])).tolist() == [0, 2, 3, 4]
    assert cu_seqlens(np.array([[1, 1, 2], [2, 2, 2]])).tolist() == [0, 2, 3, 6]


def tokens(length: int) -> Any:
    return {"x": np.arange(length)}


def first_of(dataset: Any) -> Any:
    return dataset[CyclicSampler(dataset, 1).batch_at(0).indices[0]]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: PackedDataset([tokens(3)], 0), ConfigError, "length of an output is 0"),
        (lambda: PackedDataset([tokens(3)], 4, lengths=[3, 4]), ConfigError, "must be 1 ints"),
        (lambda: PackedDataset([tokens(3)], 4, lengths=[-1]), ConfigError, "lengths has -1 for sample 0"),
        (lambda: PackedDataset([tokens(3)], 4, lengths=[2]), SchemaError, "sample 0 has 3 tokens, but lengths says 2"),
        (
            lambda: PackedDataset([tokens(5)], 4, cut=False),
            ConfigError,
            "sample 0: it has 5 tokens, which do not fit .* 4",
        ),
        (lambda: PackedDataset([tokens(5)], 4, cut=False, lengths=[5]), ConfigError, "sample 0 has 5 tokens"),
        (lambda: PackedDataset([{"x": np.array(1)}], 4), SchemaError, "the length of the sample"),
        (lambda: PackedDataset([{"segment_ids": np.arange(4)}], 4), SchemaError, "field 'segment_ids' already"),
        (lambda: PackedDataset([tokens(4)], 4, segments="s", positions="s"), SchemaError, "field 's' already"),
        (lambda: FilteredDataset([tokens(3)], [True, False]), ConfigError, "1 bools"),
        (lambda: FilteredDataset([tokens(3)], [False]), ConfigError, "keeps none of the 1 samples"),
        (lambda: FilteredDataset([tokens(3)], lambda sample: False), ConfigError, "keeps none"),
        (
            lambda: FilteredDataset(PackedDataset([tokens(3)], 4), [True]),
            ConfigError,
            "pack or filter a OneRound of it",
        ),
    ],
)
def test_what_cannot_be_transformed_is_refused(make: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        first_of(make())


def test_a_sample_that_fails_while_a_sampler_looks_for_outputs_is_named() -> None:
    def fails(sample: Any) -> bool:
        raise KeyError("keep")

    sampler = CyclicSampler(FilteredDataset(Documents([3] * 8), fails), 2)
    with pytest.raises(SampleError, match=r"sample 0 of Documents: KeyError: 'keep'"):
        next(iter(sampler))


@pytest.mark.parametrize("options", WORKERS[:3], ids=WORKER_NAMES[:3])
@pytest.mark.parametrize("known", [True, False])
def test_another_sample_is_packed_in_the_place_of_one_that_fails(known: bool, options: Any) -> None:
    lengths, bad = [3, 9, 1, 14, 2, 6, 2, 8], (1, 4)
    seed, epoch = 3, 0

    def chosen(index: int) -> int:
        tried = (substitute_index(seed, epoch, index, attempt, len(lengths)) for attempt in range(100))
        return next(each for each in tried if each not in bad)

    def packs(documents: Any, batches: int, state: Any = None, **more: Any) -> list[Any]:
        dataset = PackedDataset(documents, 5, lengths=lengths if known else None, positions=None, segments=None)
        return stream(dataset, CyclicSampler(dataset, 2, True, seed=seed), batches, state, **more)

    samples = [Documents(lengths)[index if index not in bad else chosen(index)] for index in range(len(lengths))]
    if known:
        for index in bad:
            fields = samples[index].get_fields()
            samples[index] = Instance(
                **{
                    name: DistTensorData(
                        np.resize(np.asarray(value.tensor), (lengths[index], *value.tensor.shape[1:])),
                        placement_idx=value.placement_idx,
                    )
                    for name, value in fields.items()
                }
            )
    skipping = {"on_error": "skip", "replacement_budget": 1.0, **options}
    found = packs(Failing(lengths, bad), 4, **skipping)
    expected = packs(samples, 4)
    assert [each[1]["tokens"][2] for each in found] == [each[1]["tokens"][2] for each in expected]
    dataset = PackedDataset(Failing(lengths, bad), 5, lengths=lengths if known else None, positions=None, segments=None)
    with loading(dataset, CyclicSampler(dataset, 2, True, seed=seed), **skipping) as loader:
        for _ in islice(iter(loader), 2):
            pass
        state = json.loads(json.dumps(loader.state_dict()))
    assert packs(Failing(lengths, bad), 2, state, **skipping) == found[2:]


def test_a_filter_replaces_what_fails_by_what_is_kept(tmp_path: Path) -> None:
    kept = [number % 7 == 1 for number in range(70)]
    quarantine = tmp_path / "bad.jsonl"
    for _ in range(2):
        dataset = FilteredDataset(Failing([3] * 70, [1, 8]), kept)
        sampler = CyclicSampler(dataset, 5, shuffle=True)
        with loading(dataset, sampler, on_error="quarantine", quarantine_file=str(quarantine)) as loader:
            batches = [batch.tokens.tensor.numpy() for batch in islice(iter(loader), 4)]
            assert loader.stats()["skipped_samples"] == 4
        assert all(kept[index] and index not in (1, 8) for batch in batches for index in batch[:, 0, 1])
        assert sorted(json.loads(line)["index"] for line in quarantine.read_text().splitlines()) == [1, 8]
        assert not {1, 8} & set(sampler.dataset.dataset.reads)  # type: ignore[attr-defined]


def test_a_sample_that_fails_only_after_the_stream_was_planned_ends_the_run() -> None:
    dataset = PackedDataset(Failing([3] * 8, [5], later=True), 6)
    skipping: dict[str, Any] = {"on_error": "skip", "num_workers": 1, "replacement_budget": 1.0}
    message = r"sample 5 .* could be read when the stream was planned.*truncated"
    with loading(dataset, CyclicSampler(dataset, 4), **skipping) as loader, pytest.raises(SampleError, match=message):
        next(iter(loader))


def test_the_budget_of_replaced_samples_counts_samples_and_not_sequences() -> None:
    lengths = [2] * 500
    for budget in (0.003, 0.001):
        dataset = PackedDataset(Failing(lengths, [7]), 40, lengths=lengths)
        with loading(dataset, CyclicSampler(dataset, 5), on_error="skip", replacement_budget=budget) as loader:
            batches = islice(iter(loader), 20)
            if budget > 1 / 500:
                assert len(list(batches)) == 20
                assert loader.stats()["skipped_samples"] == 4
            else:
                with pytest.raises(SampleError, match="skipped 2 of 1000 samples"):
                    list(batches)


def test_what_a_transform_cannot_promise_is_refused() -> None:
    dataset = PackedDataset([tokens(3)] * 4, 4)
    with pytest.raises(ConfigError, match=r"not known in advance.*OneRound"):
        SingleRoundSampler(dataset, 1)
    with pytest.raises(ConfigError, match="drop_last"):
        CyclicSampler(dataset, 1, drop_last=True)
    sampler = CyclicSampler(dataset, 1, seed=1)
    with pytest.raises(ConfigError, match=r"skip_steps is \[\[2, 3\]\]"):
        sampler.follow(StepSchedule(((0, 1),)), skip_steps=((2, 3),))
    with pytest.raises(ConfigError, match="serves two samplers"):
        CyclicSampler(dataset, 1, seed=2)
    with pytest.raises(ConfigError, match=r"serves two samplers.*\) without end and Order\(.*\) of single epochs\)"):
        DataLoader(dataset, 1, seed=1)
    with pytest.raises(TypeError, match="not known in advance"):
        len(DataLoader(dataset, sampler))


def test_a_filter_that_another_class_reads_by_index_is_told_what_to_use_instead() -> None:
    filtered = FilteredDataset(Documents([2, 3]), is_even)
    within = pytest.importorskip("torch").utils.data.Subset(filtered, [0])
    with pytest.raises(SampleError, match=r"pass it itself to a loader.*or read it by index as OneRound\(FilteredData"):
        next(iter(DataLoader(within, 1).numpy()))
