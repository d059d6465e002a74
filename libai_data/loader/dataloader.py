"""The DataLoader: batches of this rank's samples, in order, as OneFlow tensors over the memory they were read into."""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import Any, Deque, Dict, Iterator, Mapping, Optional

from libai_data.loader.batches import BatchReader, PendingBatch
from libai_data.loader.collate import Collator, trivial_batch_collator
from libai_data.loader.executor import InProcessExecutor
from libai_data.loader.reading import SampleReader
from libai_data.loader.schema import Overrides, parse_layouts
from libai_data.loader.slots import SlotRing
from libai_data.samplers.listed import as_stream
from libai_data.structures import Instance


class DataLoader:
    """Iterates over batches of a dataset, each an Instance of OneFlow tensors [rows of this rank, ...].

    An endless sampler's stream goes on with each new iterator; a single round begins anew, unless a restored state
    stands in the middle of one. Only the newest iterator may be used.

    Args:
        dataset: `dataset[index]` returns an Instance, or a dict of arrays; `read_batch` and `__getitems__` are used
            where they exist (see `SampleReader`).
        batch_sampler: CyclicSampler, SingleRoundSampler, or any iterable of lists of indices.
        collate_fn: makes a batch of a list of samples; by default samples are stacked, straight into the batch's
            memory.
        seed: with epoch and index it decides what random transforms draw.
        layouts: field name -> {"sbp_list": [...], "placement_idx": int}, instead of what the dataset says.
        mixup_func: kept for the trainer, which applies it to each batch.

    Raises:
        ConfigError: An argument is out of range, or a layout malformed.
    """

    def __init__(
        self,
        dataset: Any,
        batch_sampler: Any,
        *,
        num_workers: int = 0,
        collate_fn: Optional[Collator] = None,
        seed: int = 0,
        layouts: Optional[Overrides] = None,
        mixup_func: Any = None,
    ) -> None:
        self.dataset = dataset
        self.batch_sampler = batch_sampler
        self.mixup_func = mixup_func
        self.stream = as_stream(batch_sampler)
        collator = None if collate_fn is trivial_batch_collator else collate_fn
        self._executor = InProcessExecutor(SampleReader(dataset, seed), collator)
        self._ring = SlotRing(planned=2)
        self._reader = BatchReader(
            self._executor, self._ring, parse_layouts(layouts), collates=collator is not None, parts=1
        )
        self._iteration: Optional[_Iteration] = None
        self._restored = False

    @property
    def global_batch_size(self) -> Optional[int]:
        """Rows of a batch over all data-parallel ranks; None with a sampler of the user's own."""
        return self.stream.global_batch_size

    def __len__(self) -> int:
        """Batches of one round, or of one epoch of an endless stream (rounded up)."""
        if self.stream.endless:
            return ceil(self.stream.order.epoch_size / self.stream.global_batch_size)
        return len(self.stream)

    def __iter__(self) -> Iterator[Instance]:
        self._break_off()
        if not self.stream.endless and not self._restored:
            self.stream.position = 0
        self._restored = False
        self._iteration = _Iteration(self.stream, self._reader, ahead=0)
        return self._iteration

    def state_dict(self) -> Dict[str, Any]:
        """The place after the last batch that was taken (those read ahead are not counted), as JSON."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved; takes effect with the next `iter(loader)`.

        Raises:
            CheckpointError: The state belongs to another stream.
        """
        self._break_off()
        self.stream.load_state_dict(dict(state))
        self._restored = True

    def close(self) -> None:
        """End all that the loader started; batches that are in use stay valid."""
        self._break_off()
        self._executor.close()
        self._ring.close()

    def _break_off(self) -> None:
        if self._iteration is not None:
            self._iteration.break_off()
            self._iteration = None


class _Iteration:
    """One pass over a stream: sends batches out ahead, in order, and hands them out in order."""

    def __init__(self, stream: Any, reader: BatchReader, ahead: int) -> None:
        self._stream = stream
        self._reader = reader
        self._ahead = ahead
        self._plan = stream.batches(stream.position)
        self._pending: Deque[PendingBatch] = deque()
        self._over = False

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Instance:
        if self._over:
            raise StopIteration
        self._send_out()
        if not self._pending:
            self._over = True
            self._stream.position = 0
            raise StopIteration
        pending = self._pending.popleft()
        try:
            batch = self._reader.finish(pending)
        except BaseException:
            self.break_off()
            raise
        self._stream.position = pending.index_batch.position + pending.index_batch.size
        return batch

    def _send_out(self) -> None:
        while len(self._pending) <= self._ahead:
            index_batch = next(self._plan, None)
            if index_batch is None:
                return
            self._pending.append(self._reader.submit(index_batch))

    def break_off(self) -> None:
        """End this pass; what was read ahead is given up, and is read again by the next one."""
        self._over = True
        while self._pending:
            self._reader.discard(self._pending.popleft())
