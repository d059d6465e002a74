"""What streams through transforms must hold, worked out sample by sample, and the datasets to test them with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from libai_data.data.random.sample_random import sample_generator
from libai_data.loader.worker_info import get_worker_info
from libai_data.structures import DistTensorData, Instance

Token = tuple[int, int, int]
"""Epoch-dependent draw, index and place in the sample of a token."""


class Documents:
    """Documents of given lengths, whose tokens say where they come from; random, if asked for."""

    def __init__(self, lengths: Sequence[int], random: bool = False) -> None:
        self.lengths = list(lengths)
        self.random = random
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Instance:
        self.reads.append(index)
        length = self.lengths[index]
        draw = int(sample_generator().integers(1000)) if self.random else 0
        if self.random:
            length += draw % 3
        tokens = np.stack([np.full(length, draw), np.full(length, index), np.arange(length)], axis=-1)
        return Instance(
            tokens=DistTensorData(tokens.reshape(length, 3)),
            labels=DistTensorData(np.arange(length), placement_idx=-1),
        )


class Failing(Documents):
    """Documents of which some cannot be read; only by workers, if asked for."""

    def __init__(self, lengths: Sequence[int], bad: Sequence[int], random: bool = False, later: bool = False) -> None:
        super().__init__(lengths, random)
        self.bad = list(bad)
        self.later = later

    def __getitem__(self, index: int) -> Instance:
        if index in self.bad and (not self.later or get_worker_info() is not None):
            raise OSError(f"document {index} is truncated")
        return super().__getitem__(index)


def is_even(sample: Any) -> bool:
    """Keeps documents of an even number of tokens."""
    return len(sample.labels.tensor) % 2 == 0


def expected_packs(lengths: Sequence[int], order: Any, units: int, cut: bool, kept: Any) -> Iterator[list[Any]]:
    """(index, place in the sample) of each token of each sequence, and the number of its segment; None for padding."""
    pack: list[Any] = []
    segment, place = 0, 0
    while True:
        index = int(order.locate(np.array([place]))[1][0])
        place += 1
        length = lengths[index] if kept(index) else 0
        if not cut and len(pack) + length > units:
            yield pack + [None] * (units - len(pack))
            pack, segment = [], 0
        segment += length > 0
        for token in range(length):
            if len(pack) == units:
                yield pack
                pack, segment = [], 1
            pack.append((index, token, segment))
        if len(pack) == units:
            yield pack
            pack, segment = [], 0


def packed_by_loop(lengths: Sequence[int], units: int) -> list[list[int]]:
    """The numbers of the samples of each pack by best fit, the longest first; packs in the order of their samples."""
    packs: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        rooms = [units - sum(lengths[each] for each in pack) - lengths[number] for pack in packs]
        fitting = [(room, pack) for pack, room in enumerate(rooms) if room >= 0]
        if lengths[number] and fitting:
            packs[min(fitting)[1]].append(number)
        elif lengths[number]:
            packs.append([number])
    return sorted(sorted(pack) for pack in packs)


def expected_windows(
    lengths: Sequence[int], order: Any, units: int, window: int, kept: Any, places: int = 1 << 20
) -> Iterator[list[Any]]:
    """As `expected_packs`, of whole samples that are packed by best fit, window by window."""
    for begin in range(0, places, window):
        indices = order.locate(np.arange(begin, min(begin + window, places)))[1].tolist()
        own = [lengths[index] if kept(index) else 0 for index in indices]
        for pack in packed_by_loop(own, units):
            tokens = [
                (indices[number], token, segment + 1)
                for segment, number in enumerate(pack)
                for token in range(own[number])
            ]
            yield tokens + [None] * (units - len(tokens))


def as_tokens(sample: Any) -> list[Any]:
    """A packed sequence in the form of `expected_packs`."""
    fields: dict[str, np.ndarray] = {name: np.asarray(value.tensor) for name, value in sample.get_fields().items()}
    np.testing.assert_array_equal(fields["tokens"][:, 2], fields["labels"])
    return [
        (index, place, segment) if segment else None
        for (_, index, place), segment in zip(fields["tokens"].tolist(), fields["segment_ids"].tolist())
    ]
