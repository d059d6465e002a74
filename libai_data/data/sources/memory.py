"""Records in memory that all workers and ranks of a machine share."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from libai_data.data.attributes import attribute_of, batch_method_of
from libai_data.data.datasets.fingerprint import fingerprint_of
from libai_data.data.datasets.mapped import refuse_outputs_without_indices
from libai_data.data.files.identity import identity_within, key_of
from libai_data.data.random.global_generators import GlobalDraws
from libai_data.data.random.sample_random import reading_samples
from libai_data.data.sources.node_memory import shared_memory
from libai_data.data.sources.sharded import Records
from libai_data.errors import ConfigError, failed_reading
from libai_data.errors.argument_rules import TEXT, check

_VERSION = 2
"""Version of the memory's content: processes of another version of this package must not share it."""
_READ_AT_ONCE = 256


class InMemorySource(Records):
    """The records of another source, read once into memory that all processes of a user on a machine share.

    The first process reads the records; other processes that need the same records wait, and then use the same memory.
    The memory is anonymous: the system releases it when the last process that uses it ends, also after `kill -9`.

    Args:
        source: a source or dataset with a length, whose records can be pickled.
        name: identifies the records, together with the source's class, length, `fingerprint()` and `identity` (or the
            identities of the sources of a dataset). The identity of a source of files is its arguments and the
            identities of the files; see `libai_data.data.files.identity`. What the records draw at random depends on
            the name and their indices, and is the same in each epoch, in each run and on each machine.

    Attributes:
        identity: identity of the records.

    Raises:
        ConfigError: The source has no identity, and no name is given; or it is a filter or packer.
        SampleError: A record of a dataset cannot be read or pickled; the message has its index.
    """

    _what = "records in memory"

    def __init__(self, source: Any, name: str = "") -> None:
        check({"name": TEXT}, name=name)
        refuse_outputs_without_indices(source)
        if not name and not attribute_of(source, "identity", ""):
            raise ConfigError(
                f"{type(source).__name__} has no identity that distinguishes its records; give InMemorySource a name "
                "for them, with a version"
            )
        fingerprint = attribute_of(source, "fingerprint")
        own_fingerprint = fingerprint() if callable(fingerprint) else ""
        kind = type(source).__qualname__
        self.identity = key_of(_VERSION, name, kind, len(source), own_fingerprint, identity_within(source))
        self.dataset, self._seed = source, int(key_of(name), 16) >> 32
        self._attach()

    @property
    def blend(self) -> Any:
        """The blend of the source; None if the source is no blend."""
        return attribute_of(self.dataset, "blend")

    def rows_of(self, number: int, rows: np.ndarray) -> list[Any]:
        places = zip(self._offsets[rows].tolist(), self._offsets[rows + 1].tolist())
        return [pickle.loads(self._content[start:stop]) for start, stop in places]

    def fingerprint(self) -> dict[str, Any]:
        """Fingerprint of the other source."""
        return fingerprint_of(self.dataset)

    def _attach(self) -> None:
        self._memory = memory = shared_memory(self.identity, self._fill)
        self._ends = np.array([len(self.dataset)])
        begin = 8 * (len(self.dataset) + 1)
        self._offsets = memory.array[:begin].view(np.int64)
        self._content = memory.array.data[begin:]

    def _fill(self, descriptor: int) -> None:
        """Write the end of each record, and the pickled records."""
        count = len(self.dataset)
        ends, draws = np.zeros(count + 1, np.int64), GlobalDraws(type(self.dataset).__name__)
        with open(descriptor, "wb", closefd=False) as file:
            file.seek(ends.nbytes)
            for first in range(0, count, _READ_AT_ONCE):
                records = self._read(range(first, min(first + _READ_AT_ONCE, count)), draws)
                for number, record in enumerate(records, first):
                    with _named(self.dataset, number):
                        content = pickle.dumps(record, protocol=5)
                    ends[number + 1] = ends[number] + file.write(content)
            file.seek(0)
            file.write(ends.data)

    def _read(self, indices: Sequence[int], draws: GlobalDraws) -> list[Any]:
        source = self.dataset
        read_many = batch_method_of(source, "read_many") if isinstance(source, Records) else None
        if read_many is not None:  # The sources of this package draw nothing.
            return list(read_many(indices))

        def read(key: tuple[int, int, int]) -> Any:
            with reading_samples((key,)):
                return source[key[2]]

        records = []
        for index in indices:
            with _named(source, index):
                key = (self._seed, 0, index)
                records.append(draws.around(partial(read, key), key))
        return records

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "_seed": self._seed, "identity": self.identity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()


@contextmanager
def _named(source: Any, index: int) -> Iterator[None]:
    """Name a record that cannot be read or pickled, in the error of the block."""
    try:
        yield
    except Exception as error:
        raise failed_reading(f"record {index} of {type(source).__name__} cannot be kept in memory", error) from error
