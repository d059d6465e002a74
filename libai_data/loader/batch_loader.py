"""The BatchLoader: batches of this rank's samples, in order, as OneFlow tensors over the memory they were read into."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Callable

from libai_data.data.attributes import attribute_of, has_attribute
from libai_data.data.cached_property import cached_property
from libai_data.data.datasets.stream_transform import StreamTransform
from libai_data.data.datasets.streamed_shards import StreamedShards
from libai_data.data.files.identity import by_content
from libai_data.data.fork_lock import ForkLock
from libai_data.data.random.kept_objects import warn_of_own_generators
from libai_data.data.samplers.batch_runs import named_runs
from libai_data.data.samplers.cursor import Cursor, EpochPositions
from libai_data.data.samplers.dealt import DealtIndices
from libai_data.data.samplers.listed import as_stream
from libai_data.data.samplers.sampler import StreamSampler
from libai_data.data.samplers.stream_state import order_in_words
from libai_data.data.transforms.batch import EVEN_LISTS, BatchTransform, check_rows_together, rows_together
from libai_data.errors import ConfigError, naming_open_files
from libai_data.errors.argument_rules import check, with_python_numbers
from libai_data.loader.arena import Arena, PrivateArena
from libai_data.loader.assembly import assemble
from libai_data.loader.batch_reader import BatchReader, ReadyBatch, info_of
from libai_data.loader.collate import Collator, trivial_batch_collator
from libai_data.loader.executor import Executor, InProcessExecutor, Payload, TaskRunner
from libai_data.loader.failures import ErrorPolicy, FailureLog
from libai_data.loader.iteration import LOADER_CLOSED, Iteration, Pass, refuse_in_fork
from libai_data.loader.named_samples import NamedSamples
from libai_data.loader.processes import ProcessExecutor
from libai_data.loader.reading import reads_parts
from libai_data.loader.resumable import ResumableLoader, finish
from libai_data.loader.same_dataset import WorkersCopy, fingerprint_with_samples, read_by_all
from libai_data.loader.schema import Overrides, TensorPart, parse_layouts
from libai_data.loader.shared_arguments import PREFETCH, RULES
from libai_data.loader.slots import Slot, SlotList
from libai_data.loader.stage_times import LoaderTimes, StageTimes, summary
from libai_data.loader.starting import WorkerStarter
from libai_data.loader.streaming import fetch_ahead, report_reached, streamed_shards
from libai_data.loader.threads import ThreadExecutor
from libai_data.mesh.current import get_data_parallel_size, get_mesh
from libai_data.structures import Agreement, Instance, new_origin, new_rows

_MOST_PARTS = 8
_IN_USE = 8
"""Batches that may be in use in addition to those read ahead: OneFlow runs some steps behind the trainer."""


class BatchLoader(ResumableLoader):
    """Iterates over batches of a dataset, each an Instance of OneFlow tensors [rows of this rank, ...].

    Neither the number of workers nor their type changes one bit of the batches. Each `iter(loader)` begins a new pass.
    With an endless sampler, the stream continues after the last batch that was used. With a finite sampler, a pass is
    the next epoch, also after a `break`. Only the first pass after `load_state_dict` is the rest of an epoch. Only the
    newest iterator may be used. Workers start with the first pass and end at `close`, or when the loader is deleted.
    If attributes of the dataset have changed, the next pass starts new workers.

    Args:
        dataset: `dataset[index]` returns an Instance, or a dict of arrays; `read_batch` and `__getitems__` are used
            where they exist (see `SampleReader`).
        batch_sampler: CyclicSampler, SingleRoundSampler, or any iterable of lists of indices.
        num_workers: with 0, the trainer's thread reads each batch when it needs the batch.
        worker_type: "process", or "thread" for decoders that release the GIL.
        threads_per_worker: threads of each worker, for slow storage; the dataset must be thread-safe.
        prefetch: batches that workers read ahead; limits the memory.
        collate_fn: makes a batch of a list of samples; by default samples are stacked, directly into the batch's
            memory.
        seed: decides, with epoch and index, the draws of random transforms.
        layouts: field name -> {"sbp_list": [...], "placement_idx": int}, instead of the dataset's layouts.
        mixup_func: a function that the trainer applies to each batch; a `BatchTransform`, such as `Mixup`, is used as
            `batch_transform` instead.
        batch_transform: changes the rows of each batch in the process that reads them.
        on_error: "raise", "skip" or "quarantine"; see `ErrorPolicy`.
        quarantine_file: where "quarantine" writes failing samples; samples that the file lists are skipped.
        replacement_budget: share of the samples that "skip" and "quarantine" may replace; see `ErrorPolicy`.
        timeout: seconds after which a worker that is busy with one task counts as hung; 0 waits forever.
        start_method: "spawn", "fork" or "auto" for worker processes; see `WorkerStarter`.
        check_every: the ranks compare their batches after this many batches (see `check_contract`); 0 never compares.
        content_hash: number of samples, spread over the dataset, that are hashed into its fingerprint; 0 reads none.
        fields: names for the values of tuples, or for a single tensor. If samples have names, the fields to use.
        worker_init_fn: called with the number of a worker process when it has started; see `get_worker_info`.
        tensor_part: this rank's place on the tensor axis. If the dataset can read parts of samples, it reads only this
            rank's part of each field that this axis splits.

    Raises:
        ConfigError: An argument is out of range, or a layout malformed.
    """

    @with_python_numbers
    def __init__(
        self,
        dataset: Any,
        batch_sampler: Any,
        *,
        num_workers: int = 0,
        worker_type: str = "process",
        prefetch: int = PREFETCH,
        collate_fn: Collator | None = None,
        seed: int = 0,
        layouts: Overrides | None = None,
        mixup_func: Any = None,
        batch_transform: BatchTransform | None = None,
        on_error: str = "raise",
        quarantine_file: str | None = None,
        replacement_budget: float = 0.01,
        timeout: float = 600.0,
        start_method: str = "auto",
        check_every: int = 100,
        content_hash: int = 0,
        fields: Sequence[str] | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        threads_per_worker: int = 1,
        tensor_part: TensorPart | None = None,
    ) -> None:
        check(RULES, **locals())
        policy = ErrorPolicy(on_error, quarantine_file, replacement_budget)
        planned = None
        if policy.substitutes and isinstance(dataset, StreamTransform):
            # A stream transform makes an output of several samples, and replaces failing samples itself.
            dataset.replace_failing(policy.known_bad)
            planned = dataset.planned_replacement if dataset.reads_to_measure else None
        if isinstance(mixup_func, BatchTransform):
            if batch_transform is not None:
                raise ConfigError("mixup_func and batch_transform are both a BatchTransform; remove one of them")
            batch_transform, mixup_func = mixup_func, None
        self.dataset = dataset
        self.seed = seed
        self.batch_sampler = batch_sampler
        self.mixup_func = mixup_func
        self.stream = as_stream(batch_sampler, dataset)
        if isinstance(self.stream, StreamSampler):
            self.stream.exchanges_starts = 1 < self.stream.data_parallel_size == get_data_parallel_size()
        self._samples = self._samples_now()
        self._refuse_other_sampler()
        self.num_workers = num_workers
        self._worker_type = worker_type
        self._ahead = prefetch if num_workers else 0
        self._shards = attribute_of(self.stream, "data_parallel_size") or get_data_parallel_size()
        together = rows_together(batch_transform)
        if self.global_batch_size is not None:
            remedy = f"make the micro batch (train.train_micro_batch_size) a multiple of {together}"
            check_rows_together(together, self.global_batch_size // self._shards, "a batch", remedy)
        for _, which, rows in named_runs(self.batch_runs() if together > 1 else ()):
            check_rows_together(together, rows, f"{which} of the {type(batch_sampler).__name__}", EVEN_LISTS)
        named = dataset if batch_transform is None or fields is None else NamedSamples(dataset, fields)
        self._payload = Payload(
            named if batch_transform is None else batch_transform.prepared(named),
            None if collate_fn is trivial_batch_collator else collate_fn,
            seed,
            ErrorPolicy() if isinstance(dataset, StreamTransform) else policy,
            batch_transform,
            None if fields is None else tuple(fields),
            worker_init_fn,
            threads_per_worker,
            reads_first_twice=check_every > 0 and (num_workers > 0 or get_mesh().world_size > 1),
            reads_once=attribute_of(dataset, "reads_once", False),
        )
        self._layouts = parse_layouts(layouts)
        self.check_every = check_every
        self._content_hash = content_hash
        if by_content():
            _ = self.fingerprint  # computes the digests of the files as they are now
        self._tensor_part = tensor_part
        self._timeout = timeout
        self._start_method = start_method
        self._shares_memory = num_workers > 0 and worker_type == "process"
        self._make_memory()
        self._failures = FailureLog(policy, type(dataset).__name__, planned)
        self._reader: BatchReader | None = None
        self._close_executor: weakref.finalize | None = None
        self._iteration: Iteration | None = None
        self._streamed: StreamedShards | None = None
        self._is_arena_shared = False
        self._turns = ForkLock()
        self._copy: WorkersCopy | None = None
        self._times = LoaderTimes()
        self._stage_times = StageTimes()

    def new_pass(self, as_numpy: bool = False) -> Pass:
        if self._samples_now() != self._samples:
            raise ConfigError(
                f"{type(self.dataset).__name__} had {self._samples} samples when its loader was made, and has "
                f"{self._samples_now()} now; make a new loader of it"
            )
        first = self.stream.next_pass()
        iteration = self.begin(first.position)
        per_batch = self.collates or not isinstance(self.stream, StreamSampler)
        repeats = isinstance(self.stream, DealtIndices)
        agreement = Agreement(per_batch, self.check_every, order_in_words(self.stream), self._shards, repeats)
        # Not a generator: it would keep the last batch alive after the trainer has dropped it. A bound method, so that
        # the iterator keeps the loader alive.
        return Pass(self.stream, first, partial(self._take, iteration, agreement, as_numpy), self.one_thread)

    def _refuse_other_sampler(self) -> None:
        theirs: Any = attribute_of(self.stream, "dataset")
        if self._samples is None or not has_attribute(theirs, "__len__") or len(theirs) == self._samples:
            return
        raise ConfigError(
            f"batch_sampler ({type(self.stream).__name__}) is for a dataset of {len(theirs)} samples, and "
            f"{type(self.dataset).__name__} has {self._samples}; make the sampler of the dataset that is loaded"
        )

    def _samples_now(self) -> int | None:
        """The number of samples of the dataset; None without a length, or if a user's own sampler lists the samples."""
        if isinstance(self.stream, StreamSampler) and has_attribute(self.dataset, "__len__"):
            return len(self.dataset)
        return None

    def _take(self, iteration: Iteration, agreement: Agreement, as_numpy: bool) -> tuple[Instance, Cursor] | None:
        batch = next(iteration, None)
        if batch is None:
            return None
        read, info = batch.index_batch, info_of(batch.index_batch)
        agreement.common_sample = self._reader.common_sample if self._reader is not None else None
        rows, skipped = new_rows((read.epochs, read.indices)), self._failures.digest
        origin = new_origin((info, rows, agreement, batch.parts, frozenset(), skipped))
        return assemble(batch.arrays, batch.layouts, batch.skeleton, origin, as_numpy), self.stream.after(info)

    def begin(self, position: int, also_kept: int = 0, fetches_ahead: bool = True) -> Iteration:
        """Begin to read batches, as arrays. The caller makes Instances from them.

        Args:
            position: position of the first batch in the stream.
            also_kept: batches that the caller keeps in addition to the one in use.
            fetches_ahead: fetch streamed shards before they are needed. Otherwise, they are fetched when they are read.
        """
        with self._turns:
            return self._begin_locked(position, also_kept, fetches_ahead)

    @naming_open_files()
    def _begin_locked(self, position: int, also_kept: int, fetches_ahead: bool) -> Iteration:
        if self._begun_in not in (0, os.getpid()):
            if self._is_arena_shared:
                refuse_in_fork(self._begun_in, "this loader")
            # This process is a fork: its parent continues the pass, with the workers and their memory.
            self._iteration = None
            self._end_workers()
        self._break_off("a newer iterator of this loader has begun; only the newest one may be used")
        if self._streamed is not None:
            # A forked worker would keep the shard files in use that the read-ahead holds.
            self._streamed.end_read_ahead()
        self._streamed = streamed_shards(self.dataset, self.stream)
        if self._streamed is not None:  # Before workers get a copy of the sources.
            is_kept = self.num_workers == 0 or self._worker_type == "thread"
            self._streamed.use_share(self.stream.share_of_node(get_mesh().parts_of_data), is_kept)
        is_current = self._copy is None or self._copy.is_current()
        if self._reader is None or self._reader.is_unusable or not is_current:
            is_copied = self.num_workers > 0 and self._worker_type == "process"
            self._copy = WorkersCopy(self._payload.dataset, self._payload.collator) if is_copied else None
            self._end_workers()
            self._renew_memory()
            self._reader = self._start()
        # With streaming, the ranks read no common sample: a node need not have the shard files of other ranks.
        if self._reader.reads_first_sample and self.check_every and self._streamed is None:
            self._reader.first_read = read_by_all(self.stream, position)
        # Twice, because the slots of an interrupted pass return only while the new pass reads ahead.
        self._slot_list.planned = 2 * self._ahead + _IN_USE + also_kept
        if fetches_ahead and self._streamed is not None:
            fetch_ahead(self._streamed, self.stream, position, self._ahead)
        # Not a bound method: the loader would be in a reference cycle, and stay alive when nobody uses it.
        reached = [] if self._copy is None else [self._copy.warn_if_changed]
        if self._streamed is not None:
            reached.append(partial(report_reached, self._streamed, self.stream))
        self._iteration = Iteration(self.stream, position, self._reader, self._ahead, self._times, reached, self._turns)
        return self._iteration

    @property
    def collates(self) -> bool:
        """Whether a collator makes the batches, so that their shapes may change."""
        return self._payload.collator is not None

    @naming_open_files()
    def _make_memory(self) -> None:
        self._arena: Arena = Arena() if self._shares_memory else PrivateArena()
        self._make_slots()

    def _make_slots(self) -> None:
        self._slot_list = SlotList(self._arena, settle=_wait_for_oneflow)

    def shared_arena(self) -> Arena:
        """Share the memory of the batches from now on, and return it; valid until `close`. Call it before reading."""
        self._shares_memory = self._is_arena_shared = True
        self._make_memory()
        return self._arena

    def _renew_memory(self) -> None:
        """After workers ended, make new slots, or count the free slots again; batches that are in use stay valid."""
        if not self._is_arena_shared:
            self._arena.close()
            self._make_memory()
        elif (self._worker_type == "thread" and self.num_workers) or self._payload.threads > 1:
            # A thread may still write into a slot.
            self._make_slots()
        else:
            self._slot_list.reclaim()

    def in_slot(self, batch: ReadyBatch) -> tuple[ReadyBatch, Slot]:
        """The batch and its slot; if a collator of this process made the batch, it is copied into a shared slot."""
        if batch.slot is not None:
            return batch, batch.slot
        slot, specs, arrays = self._slot_list.copied(batch.arrays)
        return batch._replace(arrays=arrays, slot=slot, specs=specs), slot

    def _start(self) -> BatchReader:
        slot_list, self._begun_in = self._slot_list, os.getpid()
        warn_of_own_generators(self.dataset)
        # In one line, so that no interrupt can come between the two steps.
        self._close_executor = weakref.finalize(self, (executor := self._executor(slot_list)).close)
        return BatchReader(
            executor,
            slot_list,
            self._layouts,
            collates=self.collates,
            parts=self._parts(),
            failures=self._failures,
            times=self._stage_times,
            tensor_part=self._tensor_part if reads_parts(self._payload.dataset, self._payload.names) else None,
            batch_transform=self._payload.batch_transform,
            shards=self._shards,
            restarts=isinstance(self.stream, EpochPositions) and not self.endless,
        )

    def _parts(self) -> int:
        """The most tasks of a batch, so that workers share each batch; `BatchReader` makes fewer of cheap samples."""
        if not self.num_workers:
            return 1
        return min(2 * self.num_workers, _MOST_PARTS)

    def _executor(self, slot_list: SlotList) -> Executor:
        payload = self._payload
        make_runner = partial(TaskRunner, payload, slot_list)
        if not self.num_workers:
            return InProcessExecutor(make_runner(), self._stage_times)
        if self._worker_type == "thread":
            return ThreadExecutor(make_runner, self.num_workers, self._timeout)
        starter = WorkerStarter(payload, self._start_method)
        return ProcessExecutor(starter, self.num_workers, self._arena, self._timeout)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """The state's entry for the dataset: its name, and the result of `dataset.fingerprint()`."""
        return fingerprint_with_samples(self.dataset, self._content_hash)

    def stats(self) -> dict[str, Any]:
        """Where the time was spent since the loader was made.

        Returns:
            Seconds in source, transform and copy (summed over workers), seconds in which the trainer waited for workers
            and workers for the trainer, the trainer's share of waiting, the bottleneck, and counts of batches, samples
            and skipped samples. For a streamed source, also the shard files that the newest pass fetched ahead.
        """
        streamed = {} if self._streamed is None else self._streamed.stats()
        return {**summary(self._stage_times, self._times), "skipped_samples": self._failures.skipped, **streamed}

    def close(self) -> None:
        """End the workers. Batches that are in use stay valid. The loader starts again when it is iterated again."""
        with self._turns:
            if self._iteration is not None:
                self._iteration.end(LOADER_CLOSED)
                self._iteration = None
            if self._streamed is not None:
                self._streamed.end_read_ahead()
            self._end_workers()
            if self._streamed is not None:
                self._streamed.close_open_shards()
            self._arena.close()

    def _end_workers(self) -> None:
        if self._reader is not None:
            self._reader.is_unusable = True
        if self._close_executor is not None:
            finish(self._close_executor)
        self._reader, self._begun_in = None, 0

    def _break_off(self, why: str) -> None:
        with self._turns:
            if self._iteration is None:
                return
            if self._reader is None or self._reader.is_unusable:
                self._iteration.end(why)
            else:
                self._iteration.break_off(why)
            self._iteration = None


def _wait_for_oneflow() -> None:
    """Wait for OneFlow, which runs some steps behind the trainer, and keeps the batches of these steps in use."""
    if "oneflow" in sys.modules:
        sys.modules["oneflow"].zeros(1).numpy()
