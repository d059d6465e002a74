"""Which batch each rank uses, so that a rank that skips a batch, or takes one more, is noticed.

The ranks of a node share memory. In each collective that uses a batch, a rank writes the place of the batch there, and
reads what its two neighbours wrote in the collective of the same number. So the later one of two neighbours notices a
difference before it uses the batch. If any ranks of the node differ, two neighbours differ. This exchanges no message.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping

from libai_data.errors import by_rank, numbers_in_words

_KEPT = 64  # collectives; ranks that are further apart do not compare
_KEY, _PLACE = struct.Struct("=Q"), struct.Struct("=7q")
_LOW = 0xFFFFFFFF


BatchPlace = tuple[int, ...]
"""What must be equal on all ranks: step, epoch, position, size and valid rows of a batch, its loader, and its fields.

The loader's number is the collective in which the ranks made the loader, or first used it. The last number is a digest
of the names, dtypes, shapes and layouts of the fields.
"""


def shared_memory(ranks: int) -> int:
    """Make the memory for the ranks of a node; returns its descriptor."""
    descriptor = os.memfd_create("libai_data_batch_notes", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, ranks * _KEPT * (_KEY.size + _PLACE.size))
    return descriptor


class BatchNotes:
    """The notes of rank `own` of a node with `ranks` ranks, and of its neighbours, in the memory of `shared_memory`."""

    def __init__(self, descriptor: int, own: int, ranks: int) -> None:
        self._memory = mmap.mmap(descriptor, ranks * _KEPT * (_KEY.size + _PLACE.size))
        self._own = own * _KEPT
        self._places = ranks * _KEPT * _KEY.size
        # A key is written and read as one word of the processor, so it is never seen half written.
        self._keys = memoryview(self._memory)[: self._places].cast("Q")
        self._neighbours = [each * _KEPT for each in {(own - 1) % ranks, (own + 1) % ranks} - {own}]

    def note(self, number: int, place: BatchPlace) -> int | None:
        """Note the batch of this rank's collective `number`; returns a neighbour with another batch, or None."""
        slot = number % _KEPT
        key = (number & _LOW) << 32 | (hash(place) & _LOW)
        own = self._own + slot
        _PLACE.pack_into(self._memory, self._places + own * _PLACE.size, *place)
        self._keys[own] = key
        for first in self._neighbours:
            other = self._keys[first + slot]
            if other != key and other >> 32 == key >> 32:
                return first // _KEPT
        return None

    def place_of(self, rank: int, number: int) -> BatchPlace:
        """The place that a rank, by its number on the node, has noted in a collective."""
        start = self._places + (rank * _KEPT + number % _KEPT) * _PLACE.size
        return _PLACE.unpack_from(self._memory, start)


def different_batches(places: Mapping[int, BatchPlace | None]) -> str:
    """Says that ranks use different batches, for an error. `places`: rank -> its batch; None for none."""
    given = [place for place in places.values() if place is not None]
    if len(given) == len(places) and len({place[:-1] for place in given}) == 1:
        return (
            f"the fields of {_in_words(given[0], False)} differ on rank {numbers_in_words(sorted(places))}: their "
            "names, order, dtypes, shapes or layouts. If your program changes a batch, it must do so in the same way "
            "on all ranks; cut or pad samples to one length, or do so in the dataset or a collate_fn"
        )
    several = len({place[-2] for place in given}) > 1
    words = {rank: "no batch" if place is None else _in_words(place, several) for rank, place in places.items()}
    return (
        f"the ranks use different batches in one step: {by_rank(words)}. Every rank must use every batch of its "
        "loader, in the same order: a rank that skips a batch (`continue` before to_global), or calls next once more, "
        "would train on rows of different batches"
    )


def _in_words(place: BatchPlace, names_loader: bool) -> str:
    step, epoch, position, size, valid, first_use, _ = place
    rows = f"{size} rows" if valid == size else f"{valid} of {size} rows"
    loader = "the loader" + f" that was made or first used in collective number {first_use}" * names_loader
    return f"step {step} of {loader} (epoch {epoch}, position {position}, {rows})"
