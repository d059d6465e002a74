"""A user's own batch sampler: any iterable of lists of indices."""

from __future__ import annotations

from collections import OrderedDict, abc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from libai_data.data.attributes import attribute_of, call_if_there, has_attribute
from libai_data.data.datasets.combine import indexed_length, length_of
from libai_data.data.datasets.fingerprint import hash_of
from libai_data.data.datasets.stream_transform import remember
from libai_data.data.nesting import array_of
from libai_data.data.samplers.batch_runs import Run, runs_of_lists
from libai_data.data.samplers.cursor import Cursor, EpochPositions, IndexBatch
from libai_data.data.samplers.resuming import allowing
from libai_data.data.samplers.sampler import StreamSampler
from libai_data.errors import CheckpointError, ConfigError, SampleError, error_text
from libai_data.errors.argument_rules import EPOCH, FLAG, TEXT, whole
from libai_data.errors.saved_state import Keys, check_state
from libai_data.mesh.current import get_data_parallel_rank, get_data_parallel_size

_DIGESTS_KEPT = 1024
"""More than the number of batches that can be listed before the trainer uses them."""

_STATE = Keys(
    # Before the first round, the epoch before the next one is -1.
    {"position": whole(0), "epoch": whole(-1, 2**31 - 1)},
    {"lists_digest": TEXT, "data_parallel_rank": whole(0), "rounds_ended": FLAG},
)


class ListedBatches(EpochPositions):
    """Adapts any iterable of index lists to the loader.

    Such a sampler alone decides which rank reads which samples. It cannot jump to a position, so a resume replays it
    from its beginning, and compares a digest of the lists with the saved digest. For one batch, the lists of all ranks
    must have the same length.

    Args:
        batches: an iterable of this rank's lists of indices, but no iterator; iterated again in each round. If
            `batches` or its attribute `sampler` has `set_epoch`, it is called with the number of each round.
        samples: number of samples of the dataset; None if not known.
    """

    endless = False
    global_batch_size: int | None = None
    """None: the length of each list decides."""
    _argument = "batch_sampler"

    def __init__(self, batches: Iterable[Any], samples: int | None = None) -> None:
        self._batches, self._samples = batches, samples
        self._name = type(batches).__name__
        self.cursor = Cursor()
        self._rounds = 0
        """Rounds of the sampler that this process has begun."""
        self._rounds_ended = 0
        self._all_ended: bool | None = None
        """Whether all rounds before the restored one ended, so that the replay may run each to its end; None if not
        known."""
        self._iterator: Iterator[Sequence[int]] | None = None
        self._digests: OrderedDict[int, str] = OrderedDict()
        self._firsts: OrderedDict[int, str] = OrderedDict()
        """Of each of the last epochs that this process has begun, the digest of the first list."""
        self._expected = self._expected_first = ""
        self._goes_back = False

    @property
    def position(self) -> int:
        """Samples of this epoch that all ranks together have used."""
        return self.cursor.position

    def batches(self, position: int) -> Iterator[IndexBatch]:
        """The batches of the cursor's epoch, beginning at `position`, a number of samples of all ranks together. If a
        restored position is the end of its epoch, the batches of the next epoch.

        Raises:
            CheckpointError: The lists differ from those before the checkpoint.
            SampleError: The sampler raised an exception.
            ConfigError: An item is no list of indices, or the sampler cannot be iterated again.
        """
        yield from self._batches_of(self.cursor.epoch, position)

    def _batches_of(self, epoch: int, position: int) -> Iterator[IndexBatch]:
        expected, first, self._goes_back = self._expected, self._expected_first, epoch in self._firsts
        self._expected = self._expected_first = ""
        self._replay_rounds(epoch, "" if position else expected)
        start, ranks = 0, get_data_parallel_size()
        self._digests = OrderedDict({0: ""})
        digest = ""
        for number, indices in enumerate(self._round(epoch)):
            if start == position and position and expected not in ("", digest):
                self._refuse(epoch, position)
            listed = self._checked(number, indices)
            own, rows, valid = self._own_part(listed, ranks)
            digest = _digest(digest, listed)
            remember(self._digests, start + valid, digest, _DIGESTS_KEPT)
            if not number:
                if first not in ("", digest):
                    self._refuse(epoch, 0)
                remember(self._firsts, epoch, digest, _DIGESTS_KEPT)
            if start >= position:
                yield IndexBatch(number, epoch, start, rows, valid, np.full_like(own, epoch), own)
            elif start + valid > position:
                self._refuse(epoch, position)
            start += valid
        if start < position or (start == position and position and expected not in ("", digest)):
            self._refuse(epoch, position)
        self._digests[0] = digest
        if position and start == position:
            yield from self._batches_of(epoch + 1, 0)

    def batch_runs(self) -> list[Run]:
        """As for `StreamSampler`."""
        return runs_of_lists(self._batches)

    def _rank_of_lists(self) -> int:
        """The coordinate on the data axis of the ranks that use these lists."""
        return get_data_parallel_rank()

    def _own_part(self, listed: np.ndarray, ranks: int) -> tuple[np.ndarray, int, int]:
        """This rank's indices of a batch, the number of rows of all ranks, and how many of these rows count."""
        return listed, len(listed) * ranks, len(listed) * ranks

    def _round(self, epoch: int) -> Iterator[Sequence[int]]:
        try:
            for each in (self._batches, attribute_of(self._batches, "sampler")):
                call_if_there(each, "set_epoch", epoch)
            iterator = iter(self._batches)
        except Exception as error:
            raise self._raised(error, 0, epoch) from error
        if iterator is self._iterator:
            raise ConfigError(iterable_once(self._batches))
        self._iterator = iterator
        self._rounds += 1
        lists = 0
        while True:
            try:
                indices = next(iterator)
            except StopIteration:
                break
            except ConfigError:
                raise
            except Exception as error:
                raise self._raised(error, lists, epoch) from error
            lists += 1
            yield indices
        if not lists and self._rounds_ended:
            raise ConfigError(iterable_once(self._batches))
        if not lists:
            raise ConfigError(
                f"the {self._argument} ({self._name}) yields no list of indices; the dataset may be smaller than one "
                "batch, with drop_last=True"
            )
        self._rounds_ended += 1

    def _raised(self, error: Exception, lists: int, epoch: int) -> SampleError:
        return SampleError(
            f"the {self._argument} ({self._name}) raised {error_text(error)} after {lists} list(s) of epoch {epoch}"
        )

    def _replay_rounds(self, rounds: int, expected: str) -> None:
        """Iterate the rounds before a restored one again, so that the sampler's own random state advances; `expected`
        is the digest of the last of these rounds, "" if not known."""
        lists = self._length()
        if isinstance(self._batches, abc.Sequence) or (lists is None and not self._all_ended):
            # A list has no random state, and a sampler without a length may be endless.
            self._rounds = max(self._rounds, rounds)
        if self._all_ended:
            lists = None
        elif self._all_ended is None and lists is not None:
            lists += 1  # A sampler may draw once more at its end, as PyTorch's RandomSampler does.
        for epoch in range(self._rounds, rounds):
            digest = ""
            for number, indices in enumerate(islice(self._round(epoch), lists)):
                digest = _digest(digest, self._checked(number, indices))
            if epoch == rounds - 1 and expected not in ("", digest):
                self._refuse(epoch, 0)
        self._all_ended = None

    def _checked(self, number: int, indices: Any) -> np.ndarray:
        what = f"batch {number} of the {self._argument} is {indices!r:.100}"
        listed = array_of(indices)
        if listed.ndim != 1 or not len(listed) or listed.dtype.kind not in "iu":
            raise ConfigError(f"{what}; it must be a list of indices")
        low, high, last = int(listed.min()), int(listed.max()), np.iinfo(np.int64).max
        if low < 0:
            raise ConfigError(f"{what}; an index must be at least 0")
        if self._samples is not None and high >= self._samples:
            raise ConfigError(f"{what}, which names the index {high}; the dataset has {self._samples} samples")
        if high >= last:
            raise ConfigError(f"{what}; an index must be below {last}")
        return listed.astype(np.int64)

    def _refuse(self, epoch: int, position: int) -> None:
        before = f"before position {position} of" if position else "of"
        instead = "remove it and set weights=" if "Weighted" in self._name else "use CyclicSampler"
        is_dealt = self._argument == "sampler"
        again = f"It has begun this epoch before: load the state into a new loader, with a new {self._name}. "
        again = again if self._goes_back else ""
        same = "global batch size of the checkpoint, on any mesh" if is_dealt else "checkpoint's number of data ranks"
        raise CheckpointError(
            f"the {self._argument} ({self._name}) does not replay: its lists {before} epoch {epoch} differ from the "
            f"lists before the checkpoint, so the samples would be others. {again}Use the {same}. Seed it "
            f"(`generator` of a torch sampler), {instead}, or continue with other samples on purpose: "
            f"{allowing('seed')}"
        )

    def order_words(self) -> dict[str, Any]:
        """What the samplers of all ranks have in common: the epoch, and its number of lists, if known."""
        return {"epoch": self.cursor.epoch, "lists per epoch": self._length()}

    def _length(self) -> int | None:
        try:
            return len(self._batches)  # type: ignore[arg-type]
        except Exception:  # the length of a torch sampler may raise, and other lengths may be no int
            return None

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the number of its samples that all ranks have used, and a digest of this rank's lists of these
        samples; at position 0, the previous epoch. Also whether all earlier rounds ended, if this is known."""
        state = {
            "position": self.position,
            "epoch": self.cursor.epoch - (self.position == 0),
            "lists_digest": self._digests.get(self.position, ""),
            "data_parallel_rank": self._rank_of_lists(),
        }
        all_ended = self._all_ended if self._rounds < self.cursor.epoch else self._rounds_ended >= self.cursor.epoch
        if all_ended is not None and not isinstance(self._batches, abc.Sequence):
            state["rounds_ended"] = all_ended
        return state

    def load_state_dict(self, state: Mapping[str, Any], override: Collection[str] = ()) -> None:
        """Resume after the samples that the state of such a sampler counts; a CheckpointError for that of another kind.
        With "seed" in `override`, the lists may differ from those before.

        Only ranks with the data-axis coordinate of the rank that saved the state compare the digest; other ranks have
        other lists.
        """
        check_state(state, _STATE, "a batch_sampler")
        position = int(state["position"])
        if position:
            check_state(state, Keys({"epoch": EPOCH}, others=True), "a batch_sampler in the middle of an epoch")
        self.cursor = Cursor(position, int(state["epoch"]) + (position == 0))
        self._all_ended = state.get("rounds_ended")
        is_own = state.get("data_parallel_rank") == self._rank_of_lists() and "seed" not in override
        self._expected = str(state.get("lists_digest", "")) if is_own else ""
        self._expected_first = "" if "seed" in override else self._firsts.get(self.cursor.epoch, "")
        self._digests = OrderedDict({self.position: self._expected})

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._expected, self._expected_first, self._all_ended = "", "", None

    def batches_per_round(self) -> int:
        """The length of the iterable; a TypeError if it has none."""
        length = self._length()
        if length is None:
            raise TypeError(
                f"the {self._argument} ({self._name}) has no length, so the number of batches is not "
                "known; give it __len__, or iterate without len(loader)"
            )
        return length

    def __len__(self) -> int:
        return self.batches_per_round()


def refuse_not_iterable(argument: str, sampler: Any, yields: str) -> None:
    """Raise a ConfigError for an object that cannot be iterated, or only once; the message names the argument."""
    if isinstance(sampler, abc.Iterator):
        raise ConfigError(iterable_once(sampler, argument))
    if has_attribute(sampler, "__iter__") and not isinstance(sampler, type):
        return
    kind = f"{sampler!r:.100} ({type(sampler).__name__})"
    if callable(sampler):
        name = attribute_of(sampler, "__name__", kind)
        kind = f"the {'class' if isinstance(sampler, type) else 'function'} {name}, which is not called"
    raise ConfigError(
        f"{argument} is {kind}; pass CyclicSampler(...), SingleRoundSampler(...) or an object whose __iter__ yields "
        f"{yields}, again for each epoch"
    )


def iterable_once(batches: Any, argument: str = "batch_sampler") -> str:
    """The message about a sampler that has no second round."""
    return (
        f"the {argument} ({type(batches).__name__}) can be iterated only once, but each epoch iterates over it again; "
        "pass a list, or an object whose __iter__ makes a new iterator each time"
    )


def _digest(before: str, listed: np.ndarray) -> str:
    return hash_of(before.encode() + listed.tobytes(), 8)


def known_length(dataset: Any) -> int | None:
    """`indexed_length`, or None if the dataset has no `__len__`, which a sampler of indices does not need."""
    return indexed_length(dataset) if _has_length(dataset) else None


def _has_length(dataset: Any) -> bool:
    # If a class was passed instead of its instance, `length_of` raises the error.
    return has_attribute(dataset, "__len__") or isinstance(dataset, type)


def as_stream(batch_sampler: Any, dataset: Any = None) -> Any:
    """Return the sampler itself if it is a `StreamSampler` or `ListedBatches`, otherwise wrap it in `ListedBatches`.

    A ConfigError if the sampler is derived from `StreamSampler`, but has its own `__iter__`, which the loader would
    ignore; or if it is no sampler of batches.
    """
    if isinstance(batch_sampler, (StreamSampler, ListedBatches)):
        name = type(batch_sampler).__name__
        if isinstance(batch_sampler, StreamSampler) and type(batch_sampler).__iter__ is not StreamSampler.__iter__:
            raise ConfigError(
                f"{name} has an __iter__ of its own, but is derived from a sampler whose batches the loader finds by "
                f"their position, without __iter__. Do not derive {name}: pass an object whose __iter__ yields lists "
                "of indices, such as those of a sampler that it has as an attribute"
            )
        if _has_length(dataset):
            length_of(dataset)
        return batch_sampler
    samples = known_length(dataset)
    refuse_not_iterable("batch_sampler", batch_sampler, "lists of indices")
    return ListedBatches(batch_sampler, samples)
