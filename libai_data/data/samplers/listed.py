"""A user's own batch sampler: any iterable of lists of indices."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, abc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from libai_data.config.argument_rules import FLAG, TEXT, whole
from libai_data.errors import CheckpointError, ConfigError
from libai_data.mesh.current import get_data_parallel_rank, get_data_parallel_size
from libai_data.data.samplers.sampler import Cursor, EpochPositions, IndexBatch, StreamSampler
from libai_data.data.samplers.stream_state import Keys, check_state

_DIGESTS_KEPT = 1024
"""More than batches can be between the one that is listed and the one that the trainer has taken."""

_STATE = Keys(
    # Before the first round, the epoch before the next one is -1.
    {"position": whole(0), "epoch": whole(-1, 2**31 - 1)},
    {"lists_digest": TEXT, "data_parallel_rank": whole(0), "rounds_ended": FLAG},
)


class ListedBatches(EpochPositions):
    """Makes any iterable of index lists serve the loader.

    Such a sampler decides alone which rank reads what, and it has no place to jump to: restoring replays it from its
    beginning. A digest of the lists tells whether they are the same again. All ranks' lists of one batch must be
    equally long.

    Args:
        batches: an iterable of this rank's lists of indices; iterated anew each round. If it, or its `sampler`, has
            `set_epoch`, this is called with the number of each round.

    Raises:
        ConfigError: It is an iterator, which has no second round.
    """

    endless = False

    def __init__(self, batches: Iterable[Sequence[int]]) -> None:
        if isinstance(batches, abc.Iterator):
            raise ConfigError(_once(batches))
        self._batches = batches
        self.cursor = Cursor()
        self._rounds = 0
        """Rounds of the sampler that were begun in this process."""
        self._rounds_ended = 0
        self._all_ended = False
        """The rounds before a restored one, which are yet to be replayed, came to an end."""
        self._lists = 0
        self._iterator: Iterator[Sequence[int]] | None = None
        self._digests: OrderedDict[int, str] = OrderedDict()
        self._expected = ""

    @property
    def position(self) -> int:
        """Samples of this epoch that all ranks have taken."""
        return self.cursor.position

    @property
    def global_batch_size(self) -> None:
        """Unknown: the lists are this rank's alone."""
        return None

    def batches(self, position: int) -> Iterator[IndexBatch]:
        """The batches of the cursor's epoch from `position`, counted in samples of all ranks together, on.

        If a restored position is the end of its epoch, the batches of the next one.

        Raises:
            CheckpointError: The lists are not those from before the checkpoint.
            ConfigError: An item is no list of indices, or the sampler cannot be iterated again.
        """
        yield from self._batches_of(self.cursor.epoch, position)

    def _batches_of(self, epoch: int, position: int) -> Iterator[IndexBatch]:
        expected, self._expected = self._expected, ""
        self._replay_rounds(epoch, "" if position else expected)
        start, ranks = 0, get_data_parallel_size()
        self._digests = OrderedDict({0: ""})
        digest = ""
        for number, indices in enumerate(self._round(epoch)):
            if start == position and position and expected not in ("", digest):
                self._refuse(epoch, position)
            listed = _checked(number, indices)
            rows = len(listed) * ranks
            digest = _digest(digest, listed)
            self._digests[start + rows] = digest
            if len(self._digests) > _DIGESTS_KEPT:
                self._digests.popitem(last=False)
            if start >= position:
                yield IndexBatch(number, epoch, start, rows, rows, np.full_like(listed, epoch), listed)
            elif start + rows > position:
                self._refuse(epoch, position)
            start += rows
        if start < position or (start == position and position and expected not in ("", digest)):
            self._refuse(epoch, position)
        self._digests[0] = digest
        if position and start == position:
            yield from self._batches_of(epoch + 1, 0)

    def _round(self, epoch: int) -> Iterator[Sequence[int]]:
        for each in (self._batches, getattr(self._batches, "sampler", None)):
            if callable(getattr(each, "set_epoch", None)):
                each.set_epoch(epoch)  # type: ignore[union-attr]
        iterator = iter(self._batches)
        if iterator is self._iterator:
            raise ConfigError(_once(self._batches))
        self._iterator = iterator
        self._rounds += 1
        lists = 0
        for indices in iterator:
            lists += 1
            yield indices
        if not lists and self._lists:
            raise ConfigError(f"round {epoch} has no list at all, another had {self._lists}: {_once(self._batches)}")
        if not lists:
            raise ConfigError(
                f"the batch_sampler ({type(self._batches).__name__}) yields no list of indices; the dataset may be "
                "smaller than a batch whose rest is dropped"
            )
        self._lists = lists
        self._rounds_ended += 1

    def _replay_rounds(self, rounds: int, expected: str) -> None:
        """Draw what a sampler with random numbers of its own drew in the rounds before a restored one.

        Args:
            rounds: that were begun before.
            expected: digest of the last one; "" if it is not known.
        """
        lists = self._length()
        if isinstance(self._batches, abc.Sequence) or (lists is None and not self._all_ended):
            # A list has no random numbers; and what has no length may have no end.
            self._rounds = max(self._rounds, rounds)
        for epoch in range(self._rounds, rounds):
            digest = ""
            for number, indices in enumerate(islice(self._round(epoch), lists)):
                digest = _digest(digest, _checked(number, indices))
            if epoch == rounds - 1 and expected not in ("", digest):
                self._refuse(epoch, 0)
        self._all_ended = False

    def _refuse(self, epoch: int, position: int) -> None:
        before = f"before position {position} of" if position else "of"
        raise CheckpointError(
            f"the batch_sampler ({type(self._batches).__name__}) does not replay: its lists {before} round {epoch} are "
            "not those from before the checkpoint, so the samples would be others. Seed it (`generator` of a torch "
            "sampler), use CyclicSampler, or go on with other samples on purpose: train.resume_override=[seed]"
        )

    def order_words(self) -> dict[str, Any]:
        """What the ranks' samplers have in common: the round, and how many lists it has, where that is known."""
        return {"epoch": self.cursor.epoch, "lists of a round": self._length()}

    def _length(self) -> int | None:
        try:
            return len(self._batches)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):  # torch's samplers have a length that may raise.
            return None

    def state_dict(self) -> dict[str, Any]:
        """At position 0, the epoch before the next one, and a digest of this rank's lists of it.

        Elsewhere the epoch, the number of samples that all ranks have taken in it, and a digest of this rank's lists of
        them. Of a sampler without a length, also whether all rounds before came to an end.
        """
        state = {
            "position": self.position,
            "epoch": self.cursor.epoch - (self.position == 0),
            "lists_digest": self._digests.get(self.position, ""),
            "data_parallel_rank": get_data_parallel_rank(),
        }
        if self._length() is None:
            state["rounds_ended"] = self._all_ended or self._rounds_ended >= self.cursor.epoch
        return state

    def load_state_dict(self, state: Mapping[str, Any], override: Collection[str] = ()) -> None:
        """Go on after as many samples.

        Args:
            state: of such a sampler. Ranks with another coordinate on the data axis than the one that saved it have
                other lists, and do not compare them.
            override: with "seed", the lists may be others than before.

        Raises:
            CheckpointError: The state is that of another kind of sampler.
        """
        check_state(state, _STATE, "a batch_sampler")
        position = int(state["position"])
        self.cursor = Cursor(position, int(state["epoch"]) + (position == 0))
        self._all_ended = state.get("rounds_ended") is True
        is_own = state.get("data_parallel_rank") == get_data_parallel_rank() and "seed" not in override
        self._expected = str(state.get("lists_digest", "")) if is_own else ""
        self._digests = OrderedDict({self.position: self._expected})

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this epoch."""
        super().set_epoch(epoch)
        self._expected = ""

    def batches_per_round(self) -> int:
        """The length of the iterable.

        Raises:
            TypeError: It has none.
        """
        length = self._length()
        if length is None:
            raise TypeError(
                f"the batch_sampler ({type(self._batches).__name__}) has no length, so that nobody knows how many "
                "batches a round has; give it __len__, or iterate without len(loader)"
            )
        return length

    def __len__(self) -> int:
        return self.batches_per_round()


def _once(batches: Any) -> str:
    return (
        f"the batch_sampler ({type(batches).__name__}) can be iterated only once, but each round iterates it anew; "
        "pass a list, or an object whose __iter__ makes a new iterator each time"
    )


def _checked(number: int, indices: Any) -> np.ndarray:
    listed = np.asarray(indices)
    if listed.ndim != 1 or not len(listed) or listed.dtype.kind not in "iu":
        raise ConfigError(f"batch {number} of the batch_sampler is {indices!r:.100}; it must be a list of indices")
    listed = listed.astype(np.int64)
    if listed.min() < 0:
        raise ConfigError(f"batch {number} of the batch_sampler is {indices!r:.100}; an index is at least 0")
    return listed


def _digest(before: str, listed: np.ndarray) -> str:
    return hashlib.blake2b(before.encode() + listed.tobytes(), digest_size=8).hexdigest()


def as_stream(batch_sampler: Any) -> Any:
    """The sampler itself if it knows positions, else wrapped in `ListedBatches`.

    Raises:
        TypeError: It is neither a sampler nor an iterable.
        ConfigError: It is an iterator, which has no second round.
    """
    if isinstance(batch_sampler, StreamSampler):
        return batch_sampler
    if not hasattr(batch_sampler, "__iter__"):
        raise TypeError(
            f"batch_sampler is a {type(batch_sampler).__name__}; pass CyclicSampler, SingleRoundSampler or any "
            "iterable of lists of indices"
        )
    return ListedBatches(batch_sampler)
