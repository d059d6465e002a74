"""The state of the train loader: how the trainer saves, restores and shows it."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from libai_data.data.attributes import attribute_of, call_if_there, has_attribute
from libai_data.data.progress_bar import progress_bar
from libai_data.data.samplers.resuming import RESTART_DATA, check_overrides
from libai_data.data.samplers.schedule import StepSchedule
from libai_data.data.samplers.stream_state import StreamState
from libai_data.delivery.gather import digest_of, gather_words
from libai_data.engine.batches import StepInputs
from libai_data.errors import CheckpointError, ConfigError
from libai_data.errors.argument_rules import EPOCH, TEXT, whole
from libai_data.errors.saved_state import Keys, check_state
from libai_data.iterables.combined import CombinedLoader
from libai_data.iterables.digest import running_digest
from libai_data.iterables.iterable_loader import IterableLoader
from libai_data.iterables.kinds import knows_its_rounds
from libai_data.iterables.plain_state import decoded, encoded
from libai_data.mesh.current import broadcast_py_object, get_rank, get_world_size, is_main_process

logger = logging.getLogger(__name__)

OVERRIDE_KEY = "train.resume_override"
_ENCODED = "encoded"
_OF_RANKS = "of ranks"
_STATE = {"round": EPOCH, "batches": whole(0), "digest": TEXT, "rank": whole(0)}


class DataState:
    """The state of a train loader, for checkpoints; a loader without `state_dict` and `load_state_dict` is counted.

    `override` says what may differ from the checkpoint on purpose (`train.resume_override`).
    """

    # Iterates over the loader; its iteration ends when the state changes. None before it is made.
    inputs: StepInputs | None = None

    def __init__(self, loader: Any, override: Collection[str] = ()) -> None:
        # The iterable from which the trainer must take batches.
        self.loader: Any = loader if has_state(loader) else CountedLoader(loader)
        self.may_be_absent = RESTART_DATA in override  # the data restart on purpose
        self.is_restored = False  # `load_state_dict` was called
        self._override = tuple(override)
        self._restored: str | None = None
        self._kept: dict[str, Any] | None = None  # the state when the loader was closed
        is_ours = isinstance(self.loader, CombinedLoader) or attribute_of(self.loader, "stream") is not None
        self._stored: Any = self.loader if is_ours else PlainState(self.loader, is_loader=True)

    @property
    def may_differ(self) -> bool:
        """Whether each rank may have another state: a loader of another package may read other samples on each."""
        return isinstance(self._stored, PlainState) and not isinstance(self.loader, CountedLoader)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._stored.state_dict()
        return state

    def close(self) -> None:
        """Close the loader after a training, of which `begin` may begin another part.

        A loader without a state could not return to its place, so its pass stays.
        """
        if not isinstance(self.loader, CountedLoader):
            self._kept = self.state_dict()
            call_if_there(self.loader, "close")
            call_if_there(self.inputs, "restart")

    def begin(self) -> None:
        """Return to where `close` was called, or before the batch that could not be read."""
        if self.inputs is not None and self.inputs.has_failed and not isinstance(self.loader, CountedLoader):
            self._kept = self.state_dict()
            self.inputs.restart()
        if self._kept is not None:
            self._stored.load_state_dict(self._kept)
        self._kept = None

    def check_finished(self, last_step: int) -> None:
        """Raise CheckpointError if the step after `last_step` has read batches and was interrupted.

        The training would leave out their samples, and the weights may be updated in part.
        """
        if self.inputs is not None and self.inputs.taken:
            stream = stream_state_of(self.loader)
            follows = stream is not None and stream.schedule is not None
            raise CheckpointError(
                f"step {last_step + 1} has read {self.inputs.taken} batch(es) and has not ended, so they would be left "
                "out. Make a new trainer, with train.resume=True to continue from the last checkpoint, or without if "
                f"there is none yet; or leave these batches out, with train(start_iter={last_step + 1})"
                f"{', after which no checkpoint can be resumed' * follows}"
            )

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the loader, unless it already has this state; None if the checkpoint has no state of the loader."""
        self.is_restored = True
        self._kept = None
        call_if_there(self.inputs, "restart")
        stream = stream_state_of(self.loader)
        if self.may_be_absent and stream is not None and stream.schedule is not None:
            raise ConfigError(
                f"{OVERRIDE_KEY} has {RESTART_DATA!r}, but the train loader ({type(self.loader).__name__}) follows the "
                f"steps of the training, so its data cannot restart. Remove {RESTART_DATA!r}, or start a new run with "
                "the weights of the checkpoint (train.load_weight)"
            )
        if self.may_be_absent:
            logger.warning("The train loader restarts its data, or resumes by itself: %s.", OVERRIDE_KEY)
            return
        if state is None:
            raise CheckpointError(
                "the checkpoint has no position in the train data, because the train loader had no state_dict when it "
                f"was written. To restart the data, or if the loader resumes by itself: {OVERRIDE_KEY}=[{RESTART_DATA}]"
            )
        if self._restored is not None and self._restored == self._as_text(state):
            return
        if not self._override:
            self._stored.load_state_dict(state)
        elif "override" in inspect.signature(self.loader.load_state_dict).parameters:
            self._stored.load_state_dict(state, override=self._override)
        else:
            raise ConfigError(
                f"{OVERRIDE_KEY} is {list(self._override)}, but load_state_dict of {type(self.loader).__name__} has no "
                "argument override"
            )
        self._restored = self._as_text(state)

    def _as_text(self, state: Mapping[str, Any]) -> str | None:
        """Text to compare a state and the loader's own: == of arrays is no bool, and loaders change returned objects.

        None if a checkpoint cannot store them; then the state is restored again.
        """
        try:
            return encoded([dict(state), self.state_dict()])
        except CheckpointError:
            return None


def check_step(stream: StreamState | None, step: int, whose: str) -> None:
    """Raise CheckpointError if `step` does not begin at the position of the stream; `whose` names the checkpoint."""
    if stream is not None and stream.schedule is not None and stream.schedule.position_of(step) != stream.position:
        raise CheckpointError(
            f"{whose} continues with step {step}, which begins at position {stream.schedule.position_of(step)}, but "
            f"its data state is at position {stream.position}; 'libai-data state edit CHECKPOINT --position N' sets it"
        )


def warn_of_other_reads(loader: Any, step: int) -> bool:
    """Warn if `DataState.loader` is not where `step` begins, as other code reads its batches; whether it warns."""
    stream = stream_state_of(loader)
    if isinstance(loader, CountedLoader) and not loader.is_read:
        logger.warning(
            "The trainer has read no batch of the train loader (%s), so a resume restarts its data: run_step reads it "
            "in another way. Give the loader state_dict and load_state_dict, or call DefaultTrainer.run_step.",
            type(loader.counted).__name__,
        )
        return True
    if stream is None or stream.schedule is None or stream.position == stream.schedule.position_of(step):
        return False
    expected = stream.schedule.position_of(step)
    logger.warning(
        "Before step %d, the train loader is at sample %d instead of %d: %s Its checkpoints cannot be resumed.",
        step,
        stream.position,
        expected,
        "other code, such as a hook, has read its batches, which the training leaves out; read another loader there."
        if stream.position > expected
        else "a step has not read its batches; let run_step read them also if it does not use them.",
    )
    return True


def has_state(thing: Any) -> bool:
    """Whether an object has a state that can be saved and restored."""
    return has_attribute(thing, "state_dict") and has_attribute(thing, "load_state_dict")


class PlainState:
    """The state of a user's object, for checkpoints: JSON would change tuples, and keys that are no texts."""

    may_differ = True

    def __init__(self, thing: Any, is_loader: bool = False) -> None:
        self._thing = thing
        self._is_loader = is_loader

    def state_dict(self) -> Any:
        """The state itself, or as one text if JSON would change it; CheckpointError if no checkpoint can store it."""
        state = self._thing.state_dict()
        with suppress(TypeError, ValueError):
            if json.loads(json.dumps(state)) == state:
                return state
        return {_ENCODED: encoded(state, with_tensors=True)}

    def check(self, name: str) -> None:
        """Raise TypeError, with this name of the object, if no checkpoint can store its state."""
        try:
            self.state_dict()
        except CheckpointError as error:
            raise TypeError(
                f"checkpoints cannot store the state_dict of the {name} ({error}); return other values, or rename "
                "the method"
            ) from error

    def load_state_dict(self, state: Any, **options: Any) -> None:
        """Restore a result of `state_dict`, also after `of_all_ranks`."""
        if isinstance(state, Mapping) and set(state) == {_OF_RANKS}:
            states, name = state[_OF_RANKS], type(self._thing).__name__
            fits = len(states) == get_world_size()
            if isinstance(self._thing, IterableLoader):
                # Ranks that do not read lack a part of the state. Which ranks read may differ, but rank 0 always reads.
                fits = fits and states[get_rank()].keys() == states[0].keys()
            elif not fits and self._is_loader:
                raise CheckpointError(
                    f"the train loader ({name}) had another state on each of {len(states)} ranks, which cannot be "
                    f"restored on {get_world_size()} ranks. Resume on as many ranks, or restart the data: "
                    f"{OVERRIDE_KEY}=[{RESTART_DATA}]"
                )
            elif not fits:
                logger.warning("%s had another state on each of %d ranks; it gets that of rank 0.", name, len(states))
            state = states[get_rank() if fits else 0]
        is_encoded = isinstance(state, Mapping) and set(state) == {_ENCODED}
        self._thing.load_state_dict(decoded(state[_ENCODED]) if is_encoded else state, **options)


def of_all_ranks(states: Mapping[str, Any]) -> dict[str, Any]:
    """States of `PlainState.state_dict`; those of all ranks where they differ, by the names of rank 0. Collective."""
    digests = {name: digest_of(json.dumps(state, sort_keys=True).encode()) for name, state in states.items()}
    first = broadcast_py_object(digests)
    if not first:
        return {}
    differ = gather_words(np.array([digests.get(name, digest) != digest for name, digest in first.items()]))
    found = {name: states.get(name) for name in first}
    for name in np.array([*first])[differ.any(axis=0)].tolist():
        ranks = range(get_world_size())
        found[name] = {_OF_RANKS: [broadcast_py_object(states.get(name), src=rank) for rank in ranks]}
    return found


class CountedLoader:
    """A train loader without a state: its batches are counted, and a resume reads them again.

    A resume also reads the epochs before, unless the loader knows its epoch (`knows_its_rounds`). A digest shows
    whether the batches are the same as before. Attributes of the loader are also attributes of this object.
    """

    def __init__(self, loader: Any) -> None:
        self.counted = loader
        self._rounds = 0  # rounds of the loader that were begun in this process
        self._round, self._batches, self._digest = 0, 0, ""
        self._restored: dict[str, Any] | None = None

    @property
    def is_read(self) -> bool:
        """Whether an iterator was taken."""
        return self._rounds > 0

    def __getattr__(self, name: str) -> Any:
        if name == "counted":
            raise AttributeError(name)
        return getattr(self.counted, name)

    def __iter__(self) -> Iterator[Any]:
        restored, self._restored = self._restored, None
        if restored is None:
            return map(self._recorded, self._begin(self._rounds))
        first = restored["round"] if knows_its_rounds(self.counted) else self._rounds
        for number in range(first, restored["round"]):
            for _ in _bar(self._begin(number), f"Reading epoch {number} of the train loader again"):
                pass
        batches = self._begin(restored["round"])
        for _ in _bar(range(restored["batches"]), "Fast-forwarding the train loader"):
            try:
                self._recorded(next(batches))
            except StopIteration:
                raise self._mismatch(f"the epoch ends after {self._batches} batches") from None
        if restored["rank"] == get_rank() and restored["digest"] not in ("", self._digest):
            raise self._mismatch("they differ from the batches before the checkpoint")
        return map(self._recorded, batches)

    def _begin(self, number: int) -> Iterator[Any]:
        self._round, self._batches, self._digest = number, 0, ""
        self._rounds = number + 1
        call_if_there(self.counted, "set_epoch", number)
        return iter(self.counted)

    def _recorded(self, batch: Any) -> Any:
        self._batches += 1
        if is_main_process():  # The checkpoint stores rank 0's state; other ranks may have other batches.
            self._digest = running_digest(self._digest, batch)
        return batch

    def _mismatch(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the train loader ({type(self.counted).__name__}) has no state_dict, so its batches of epoch "
            f"{self._round} were read again, but {what}. Seed its shuffling, or give it state_dict and "
            f"load_state_dict. To continue at the same batch although the batches differ: {OVERRIDE_KEY}=[seed]. To "
            f"restart its data, or if it resumes by itself: {OVERRIDE_KEY}=[{RESTART_DATA}]"
        )

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the number of its batches that were used, their digest, and the rank that used them."""
        if self._restored is not None:
            return dict(self._restored)
        return {"round": self._round, "batches": self._batches, "digest": self._digest, "rank": get_rank()}

    def load_state_dict(self, state: Mapping[str, Any], override: Collection[str] = ()) -> None:
        """Continue where `state` was saved, with the next iterator.

        With the override "seed", the batches that are read again may differ from those before the checkpoint.
        """
        check_overrides(override)
        check_state(state, Keys({}, _STATE, others=True), "the trainer")
        if set(state) != set(_STATE):
            raise CheckpointError(
                f"the checkpoint's data state is {dict(state)}, which the train loader ({type(self.counted).__name__}) "
                f"cannot load, because it has no state_dict; to restart its data: {OVERRIDE_KEY}=[{RESTART_DATA}]"
            )
        self._restored = {**state, "digest": "" if "seed" in override else state["digest"]}


def _bar(batches: Any, what: str) -> Any:
    return progress_bar(batches, what, unit="batch", delay=1, leave=False, disable=not is_main_process())


def stream_state_of(loader: Any) -> StreamState | None:
    """The state of the endless stream of a loader of this package; None for any other loader."""
    state = attribute_of(attribute_of(loader, "stream"), "state")
    return state if isinstance(state, StreamState) else None


def schedule_of(loader: Any, global_batch_size: int) -> StepSchedule:
    """The schedule that a loader follows; if it follows none, steps of `global_batch_size` samples."""
    state = stream_state_of(loader)
    if state is not None and state.schedule is not None:
        return state.schedule
    return StepSchedule(((0, global_batch_size),))
