"""The rows of one step, as the ranks would read them, with their origins and stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from libai_data.commands.one_rank import OneRank
from libai_data.data.attributes import attribute_of, has_attribute
from libai_data.data.datasets.combine import ConcatDataset, RandomPart, Subset
from libai_data.data.nesting import taken_apart
from libai_data.data.random.global_generators import seeded
from libai_data.data.random.hashing import combine64
from libai_data.data.random.sample_random import reading_samples
from libai_data.data.samplers.batch_runs import rounded_up
from libai_data.data.samplers.ledger import Ledger
from libai_data.data.samplers.single_round import ShortEndSampler, SingleRoundSampler
from libai_data.engine.data_state import stream_state_of
from libai_data.engine.saved_data_state import source_of
from libai_data.errors import ConfigError
from libai_data.iterables.iterable_loader import indexed_dataset_of
from libai_data.loader.batch_loader import BatchLoader
from libai_data.loader.schema import Layout, array_of, layout_of
from libai_data.structures import batch_info, fields_of

Stage = tuple[str, Any]
"""A sample after a stage of its dataset: (name of the stage, Pillow image or array)."""


@dataclass(frozen=True)
class RowOrigin:
    """The sample of a row of a step, and the data-parallel rank that uses the row."""

    row: int
    shard: int  # coordinate of the rank on the data axis
    epoch: int | None  # epoch of the sample; None if the loader does not report it
    index: int | None  # index of the sample; None if the loader does not report it
    source: str = ""  # name of the sample's dataset, and the sample's index there, in words

    @property
    def name(self) -> str:
        """The row in a few words, for messages."""
        return f"row {self.row}" if self.index is None else f"sample {self.index} (row {self.row})"


@dataclass
class StepRows:
    """Rows of a step."""

    step: int
    position: int  # position of the step's first sample in the stream
    size: int  # rows of the whole step; perhaps only the first rows were read
    micro_batch_size: int  # rows of one batch of one data-parallel rank
    origins: list[RowOrigin] = field(default_factory=list)
    # Field -> its array in each row that was read, without the batch dim.
    values: dict[str, list[np.ndarray]] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    collated: bool = False  # whether a collator makes the batches, so that their shapes may change


def read_step(
    opened: OneRank, split: str, loader: Any, step: int, data_parallel_size: int, micro_batch_size: int, rows: int
) -> StepRows:
    """Read the first `rows` rows of a step, or all if it has fewer; whole batches are read, so there may be more.

    Args:
        step: number of the step, from 0; for an evaluation, of the batch of all ranks.
        micro_batch_size: rows of each rank in a batch of an evaluation.
    """
    stream = attribute_of(loader, "stream")
    # A user's own sampler may follow steps too, but its state has another form.
    state = stream_state_of(loader) if isinstance(loader, BatchLoader) else None
    if split == "train" and opened.follows and state is not None:
        positions = Ledger(state).positions_of(step)
        size = len(positions)
        batch = opened.plan.sizes[size].micro_batch_size if size in opened.plan.sizes else size
        found = StepRows(step, positions.start, size, batch)
    else:
        batch = opened.plan.first.micro_batch_size if split == "train" else micro_batch_size
        size = opened.plan.first.global_batch_size if split == "train" else batch * data_parallel_size
        found = StepRows(step, step * size, size, batch)
    found.collated = bool(attribute_of(loader, "collates", False))
    if isinstance(loader, BatchLoader) and isinstance(stream, SingleRoundSampler):
        batches = opened.plan.first.num_accumulation_steps if split == "train" else 1
        spans = _spans(stream, range(step * batches, (step + 1) * batches), batch, data_parallel_size)
        if split != "train":  # An evaluation has one epoch.
            spans = [span for span in spans if span.position < stream.order.epoch_size]
        found.position = spans[0].position if spans else 0
        found.size = sum(span.rows for span in spans)
        chunks = ((span, chunk) for span in spans for chunk in _from_position(loader, span.position, span.rows))
    else:
        whole = _Span(found.position, found.size, found.micro_batch_size)
        if isinstance(loader, BatchLoader) and stream is not None and has_attribute(stream, "batch_at"):
            chunks = ((whole, chunk) for chunk in _from_position(loader, found.position))
        else:
            chunks = ((whole, chunk) for chunk in _from_beginning(loader, found.position // found.micro_batch_size))
    wanted = min(max(rows, 1), found.size)
    for span, chunk in chunks:
        _add_rows(found, chunk, span, data_parallel_size, _sources(loader))
        if len(found.origins) >= wanted:
            break
    else:  # The epoch ends within the step.
        found.size = len(found.origins)
    if not found.origins:
        first = "; of this loader, only the first epoch can be shown" if split == "train" else ""
        end = f"ends before it (counted from 0){first}" if step else "yields no batch; its dataset is empty"
        raise ConfigError(f"there is no step {step}: the loader {end}")
    return found


class _Span(NamedTuple):
    """Rows of a step that follow each other in the stream: a global batch of a finite epoch, or the whole step."""

    position: int
    rows: int
    rows_of_rank: int  # of one batch of one data-parallel rank
    first_row: int = 0  # in the step


def _spans(stream: SingleRoundSampler, numbers: range, micro_batch_size: int, data_parallel_size: int) -> list[_Span]:
    """The global batches with these numbers, counted over all epochs, as the ranks of a mesh divide them."""
    size, epoch_size = micro_batch_size * data_parallel_size, stream.order.epoch_size
    in_epoch = epoch_size // size if stream.drop_last else -(-epoch_size // size)
    spans: list[_Span] = []
    for epoch, number in (divmod(number, in_epoch) for number in numbers if in_epoch):
        rows, of_rank = min(size, epoch_size - number * size), micro_batch_size
        if isinstance(stream, ShortEndSampler):
            of_rank = rounded_up(rows, data_parallel_size * stream.together) // data_parallel_size
        position = epoch * epoch_size + number * size
        spans.append(_Span(position, rows, of_rank, sum(span.rows for span in spans)))
    return spans


class _Chunk(NamedTuple):
    arrays: Mapping[str, np.ndarray]
    layouts: Mapping[str, Layout]
    epochs: np.ndarray | None
    indices: np.ndarray | None
    valid: int


def _from_position(loader: BatchLoader, position: int, rows: int | None = None) -> Iterator[_Chunk]:
    """Batches from a position on: of so many rows, or of all that follow in an endless stream or the first epoch."""
    left = rows
    for ready in loader.begin(position, fetches_ahead=False):
        batch = ready.index_batch
        if left is None and batch.epoch and not loader.stream.endless:
            return  # The position is after the end of the first epoch.
        valid = batch.valid if left is None else min(batch.valid, left)
        # The outputs of a filter or packer have no index.
        indices = None if loader.stream.makes_outputs else batch.indices
        yield _Chunk(ready.arrays, ready.layouts, batch.epochs, indices, valid)
        left = None if left is None else left - valid
        if left == 0:
            return


def _from_beginning(loader: Any, skipped: int) -> Iterator[_Chunk]:
    """Batches of a loader that cannot start at a position: the first `skipped` batches are read and dropped."""
    for batch in islice(iter(loader), skipped, None):
        leaves: dict[str, Any] = {}
        taken_apart(fields_of(batch), leaves)
        tensors = {name: value for name, value in leaves.items() if not isinstance(value, list)}
        arrays = {name: array_of(value, name) for name, value in tensors.items()}
        info, rows = batch_info(batch), min((len(array) for array in arrays.values()), default=0)
        layouts = {name: layout_of(value, name) for name, value in tensors.items()}
        yield _Chunk(arrays, layouts, None, None, rows if info is None else min(rows, info.valid))


def _add_rows(
    found: StepRows, chunk: _Chunk, span: _Span, data_parallel_size: int, sources: list[tuple[str, int]]
) -> None:
    for own in range(min(chunk.valid, found.size - len(found.origins))):
        row = len(found.origins)
        shard = (row - span.first_row) // span.rows_of_rank % data_parallel_size
        if chunk.indices is None or chunk.epochs is None:
            origin = RowOrigin(row, shard, None, None)
        else:
            index = int(chunk.indices[own])
            name, in_source = source_of(sources, index) if sources else ("", 0)
            origin = RowOrigin(row, shard, int(chunk.epochs[own]), index, f"{name}, {in_source}" if name else "")
        found.origins.append(origin)
        for name, array in chunk.arrays.items():
            found.values.setdefault(name, []).append(array[own])
    found.layouts.update(chunk.layouts)


def _sources(loader: Any) -> list[tuple[str, int]]:
    """Names and lengths of the datasets that the loader's dataset concatenates; empty if it is not a concatenation."""
    parts = getattr(indexed_dataset_of(loader), "datasets", None)
    if not isinstance(parts, (list, tuple)) or sum(map(len, parts)) != len(loader.dataset):
        return []
    return [(type(part).__name__, len(part)) for part in parts]


def stages_of_sample(dataset: Any, seed: int, epoch: int, index: int) -> list[Stage]:
    """A sample after each stage of its dataset, with the random numbers that a loader with this seed would use.

    Args:
        dataset: its method `stages(index)` yields (name of the stage, Pillow image or array); the last stage is the
            field of the model. A dataset of datasets uses the inner dataset's method. Without the method: no stages.
    """
    own = index
    while not callable(attribute_of(dataset, "stages")):
        if isinstance(dataset, ConcatDataset):
            number, own = dataset.locate(own)
            dataset = dataset.datasets[number]
        elif isinstance(dataset, (Subset, RandomPart)):
            dataset, own = dataset.dataset, int(dataset.indices(np.array([own]))[0])
        else:
            return []
    key = seed, epoch, index
    with reading_samples((key,)), seeded(combine64(*key)):
        return list(dataset.stages(own))
