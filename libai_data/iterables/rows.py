"""The rows of an iterable, epoch after epoch, and places to resume at."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from libai_data.data.items import array_in, leaves_of_batch, named, rows_in
from libai_data.data.progress_bar import progress_bar
from libai_data.data.samplers.resuming import allowing
from libai_data.delivery.gather import digest_of
from libai_data.errors import CheckpointError, ConfigError, PassError, SchemaError
from libai_data.iterables.collation import BatchRow
from libai_data.iterables.digest import running_digest
from libai_data.iterables.failed_rows import FailedRow
from libai_data.iterables.interleaved import open_round
from libai_data.iterables.iterable_source import Source
from libai_data.iterables.prefetcher import Flag, Prefetcher
from libai_data.loader.failures import FailureLog, SkippedSample
from libai_data.loader.iteration import LOADER_CLOSED
from libai_data.mesh.current import is_main_process
from libai_data.structures import batch_info


class Row(NamedTuple):
    """A row, and its place in the stream."""

    epoch: int
    number: int  # number of the row in the epoch; a `FailedRow` has the number of the next row
    piece: Any  # a sample as the iterable yielded it, a `BatchRow`, or a `FailedRow`


@dataclass(frozen=True)
class Mark:
    """A row of an epoch, and the state of the iterable before this row."""

    index: int
    state: str
    digest: str = ""  # running digest of the epoch's rows before the mark; "" if it is not known


@dataclass(frozen=True)
class Place:
    """A place between two rows."""

    epoch: int = 0
    index: int = 0  # number of rows of the epoch before the place
    digest: str = ""  # running digest of the epoch's rows before the place; "" if it is not known
    mark: Mark | None = None  # a saved state at or before the place; the rows from it on show whether it fits


@dataclass(frozen=True)
class ReadingOptions:
    """How iterables are read."""

    names: Sequence[str] | None = None
    cycle: bool = False  # restart the iterable whenever it ends
    ahead: int = 4  # groups of rows, or batches, to read ahead
    timeout: float = 600.0  # seconds without an item after which an iterable counts as hung
    failures: FailureLog | None = None  # counts the rows that are left out


class RowReader:
    """Reads the rows of an iterable from any place on."""

    def __init__(self, source: Source, options: ReadingOptions, shard: int = 0, num_shards: int = 1) -> None:
        self._source = source
        self._options = options
        self._shard, self._num_shards = shard, num_shards
        self._waiting: deque[Row] = deque()
        self._prefetcher: Prefetcher | None = None
        self.closed = Flag()  # of the reading that has begun
        self._group_size = 1
        self._epoch = 0
        self._next_index = 0
        self._before: Mark | None = None
        self._after: Mark | None = None
        self.place = Place()
        self.taken_word = 0
        self._has_had_rows = self._is_skipping = False
        self._shapes: dict[str, tuple[int, ...]] = {}

    def begin(self, place: Place, group_size: int, closed: Flag) -> None:
        """Move to a place, by the state of its mark or by counting rows; `group_size` rows are read at a time.

        Another thread sets `closed` to end the reading. Raises CheckpointError if the iterable ends before the place,
        or yields other rows than before the checkpoint.
        """
        self._group_size, self.closed, self._source.closed = group_size, closed, closed
        self.close()
        mark = place.mark
        if mark is not None and mark.index == place.index and place.digest and self._source.reopens(place.epoch):
            # No row from the mark on shows whether the state fits, so the first rows of the epoch are read again.
            mark, place = None, replace(place, mark=None)
        earlier = self._source.rounds_to_replay(place.epoch) if mark is None else 0
        for epoch in range(place.epoch - earlier, place.epoch):
            self._open(epoch, None)
            with self._progress(None, epoch) as bar:
                while self._fill():
                    bar.update(len(self._waiting))
                    self._waiting.clear()
        self._open(place.epoch, mark)
        if mark is not None:
            self.place = Place(place.epoch, mark.index, mark.digest)
        self._is_skipping = True
        self._skip(place.index - self.place.index)
        self._is_skipping = False
        is_known = mark is None or bool(mark.digest)
        if is_known and place.digest and self.place.digest != place.digest:
            raise self._other_rows(place)
        if not is_known:
            self.place = replace(self.place, digest=place.digest)
            self._before = None if self._before is None else replace(self._before, digest="")

    def _other_rows(self, place: Place) -> CheckpointError:
        name, override = self._source.name, allowing("seed")
        if place.mark is None:
            return CheckpointError(
                f"{name} does not replay: the first {place.index} rows of epoch {place.epoch} differ from the rows "
                "before the checkpoint, so fast-forwarding cannot reach the saved row. Seed its shuffling (by `epoch`, "
                "if each epoch is shuffled), or give it state_dict and load_state_dict. To continue at the same row "
                f"although the rows differ: {override}"
            )
        return CheckpointError(
            f"{name} does not continue where its state was saved: rows {place.mark.index} to {place.index - 1} of "
            f"epoch {place.epoch} differ from the rows before the checkpoint. Either its data or its seeds have "
            "changed since, or load_state_dict does not restore what state_dict saved. To continue after these rows "
            f"although they differ: {override}"
        )

    def _skip(self, rows: int) -> None:
        if rows <= 0:
            return
        with self._progress(rows, self._epoch) as bar:
            left = rows
            while left:
                taken = len(self.take(min(left, max(self._group_size, 256))))
                if not taken:
                    raise CheckpointError(
                        f"{self._source.name} has become shorter: it ended {left} rows before the row of the checkpoint"
                    )
                left -= taken
                bar.update(taken)

    def _progress(self, rows: int | None, epoch: int) -> Any:
        return progress_bar(
            total=rows,
            desc=f"Fast-forwarding {self._source.name}, epoch {epoch}",
            unit="row",
            delay=1,
            leave=False,
            disable=not is_main_process(),
        )

    def take(self, count: int) -> list[Row]:
        """The next rows; fewer at the end of the epoch, unless the iterable cycles.

        Also sets `taken_word`, a number that is equal on all readers of the same rows. Raises ConfigError for an epoch
        without rows that should have some; and as `Prefetcher.next_group`.
        """
        rows: list[Row] = []
        digests: list[Any] = []
        while len(rows) < count:
            if not self._waiting and not self._fill():
                if not self._next_index and self._has_had_rows and not self._source.knows_epoch:
                    raise self._source.goes_once()
                if not self._options.cycle:
                    break
                if not self._next_index:
                    raise ConfigError(
                        f"{self._source.name} yields no samples in epoch {self._epoch}, so it cannot cycle"
                    )
                self._open(self._epoch + 1, None)
                continue
            if not self._waiting:  # The iterable has yielded a batch without rows.
                continue
            row = self._waiting.popleft()
            if isinstance(row.piece, FailedRow):
                self._leave_out(row)
                continue
            self._has_had_rows = True
            digest = running_digest(self.place.digest if row.number else "", row.piece, self._options.names)
            self.place = Place(row.epoch, row.number + 1, digest)
            # Each epoch has a digest of its own, so the digest of the last row does not cover epochs that ended here.
            digests.append((row.epoch, row.number, digest))
            rows.append(row)
        self.taken_word = digest_of(repr(digests).encode())
        # The state before the last group, if there is one, so that a resume reads some rows again and compares them.
        mark = self._before if self._waiting or self._before is not None else self._after
        self.place = replace(self.place, mark=mark)
        if self._options.failures is not None and not self._is_skipping:
            self._options.failures.deliver(len(rows), [])
        return rows

    def _leave_out(self, row: Row) -> None:
        """Count a row that could not be read, unless it is before the place to resume at."""
        if self._options.failures is None or self._is_skipping:
            return
        error, kind = row.piece
        if over_budget := self._options.failures.deliver(1, [SkippedSample(row.epoch, row.number, None, error, kind)]):
            raise over_budget

    def first_rows(self) -> int:
        """The number of rows of the first batch of the iterable; 0 if there is none."""
        while True:
            rows = sum(not isinstance(row.piece, FailedRow) for row in self._waiting)
            if rows or not self._fill():
                return rows

    def _fill(self) -> bool:
        prefetcher = self._prefetcher  # Another thread may close this reader.
        if self.closed.is_set:
            raise PassError(LOADER_CLOSED)
        if prefetcher is None:
            return False
        group = prefetcher.next_group()
        # No row is waiting, so the place is where the last group ended.
        self._before = None if self._after is None else replace(self._after, digest=self.place.digest)
        for item in group.items:
            self._waiting.extend(self._rows_of(item))
        self._after = Mark(self._next_index, group.state) if group.state is not None else None
        if group.is_last:
            # At the end of an epoch, the state of many iterables is that of the next epoch's beginning.
            self._after = self._before
            prefetcher.close()
            self._prefetcher = None
        return bool(self._waiting) or not group.is_last

    def _rows_of(self, item: Any) -> list[Row]:
        if isinstance(item, FailedRow):
            return [Row(self._epoch, self._next_index, item)]
        if not self._source.batches:
            if batch_info(item) is not None:
                raise SchemaError(
                    f"{self._source.name} yields batches of a loader of libai_data; use this loader itself"
                )
            pieces = [item]
        else:
            leaves: dict[str, Any] = {}
            skeleton = leaves_of_batch(named(item, self._options.names), leaves)
            self._check_shapes(leaves)
            pieces = [BatchRow(leaves, skeleton, row) for row in range(self._rows_in(leaves))]
        first = self._next_index
        self._next_index += len(pieces)
        return [Row(self._epoch, first + number, piece) for number, piece in enumerate(pieces)]

    def _rows_in(self, leaves: dict[str, Any]) -> int:
        try:
            return rows_in(leaves)
        except SchemaError as error:
            raise SchemaError(
                f"{self._source.name} yields no batches: {error}. If it yields samples, make batches of them: "
                "DataLoader(dataset, batch_size=...)"
            ) from None

    def _check_shapes(self, leaves: dict[str, Any]) -> None:
        """Raise an error early if rows of other shapes would have to be joined to a short last batch."""
        runs = self._source.batch_runs
        if not self._options.cycle or len(runs) < 2:
            return
        shapes = {name: array_in(value).shape[1:] for name, value in leaves.items() if hasattr(value, "shape")}
        self._shapes = self._shapes or shapes
        for name, shape in shapes.items():
            if shape != self._shapes.get(name, shape):
                raise SchemaError(
                    f"{self._source.name} pads its batches to different lengths (rows of field '{name}' are "
                    f"{list(self._shapes[name])}, then {list(shape)}), and its last batch has only "
                    f"{runs[-1].rows} rows. With ends='cycle', rows of the next epoch are joined to the "
                    "last batch, which needs equal shapes: set drop_last=True, pad to one length, or give "
                    "from_iterable the dataset and the collate_fn instead of the loader"
                )

    def _open(self, epoch: int, mark: Mark | None) -> None:
        self.close()
        self._waiting.clear()
        self._epoch, self._next_index = epoch, 0 if mark is None else mark.index
        self._before = self._after = mark
        self.place = Place(epoch)
        source, shard, num_shards = self._source, self._shard, self._num_shards
        state = None if mark is None else mark.state
        self._prefetcher = Prefetcher(
            lambda: open_round(source, epoch, shard, num_shards, state),
            1 if source.batches else self._group_size,
            self._options.ahead,
            source.name,
            self._options.timeout,
            self.closed,
            draws_in_torch=source.batches,
        )

    def close(self) -> None:
        """Stop the prefetching."""
        if (prefetcher := self._prefetcher) is not None:
            prefetcher.close()
            self._prefetcher = None
