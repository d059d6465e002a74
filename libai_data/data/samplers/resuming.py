"""Resuming: whether a saved state fits a stream, and how the stream continues if it differs on purpose."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Callable

from libai_data.data.datasets.blend import Blend
from libai_data.data.samplers.blend_order import BlendOrder
from libai_data.data.samplers.blend_turns import phases_of
from libai_data.data.samplers.schedule import LeftOut, StepSchedule
from libai_data.data.samplers.stream_state import ORDER_KEYS, StreamState
from libai_data.data.samplers.weighted_order import WeightedOrder
from libai_data.errors import CheckpointError, ConfigError, nearest

OVERRIDES = ("dataset", "seed", "shuffle", "drop_last", "global_batch_size", "order_version", "weights", "lanes")
"""The differences from a checkpoint that a user can allow, for example with `train.resume_override=[seed]`."""

RESTART_DATA = "restart_data"
"""Name in `train.resume_override` with which the trainer does not restore the data state of the train loader."""

_OVERRIDE_OF = {"samples": "dataset", "epoch_size": "drop_last"}

PlacesToSkip = Callable[[StepSchedule], LeftOut]


def check_overrides(override: Collection[str], others: Sequence[str] = ()) -> None:
    """Raise a ConfigError for names that are neither in `OVERRIDES` nor in `others`."""
    if isinstance(override, str) or not isinstance(override, Collection):
        raise ConfigError(f"override is {override!r:.100}; it must be a list of names, such as ['seed']")
    for name in override:
        if name not in (*OVERRIDES, *others):
            raise ConfigError(
                f"resume_override names {name!r}; allowed: {list(OVERRIDES)}, and in a trainer {RESTART_DATA!r}."
                f"{nearest(name, (*OVERRIDES, *others))}"
            )


def refuse(differences: Mapping[str, str], override: Collection[str]) -> None:
    """Raise a CheckpointError if a saved state has differences that `override` does not allow; `differences` has the
    name of the override that allows each -> the difference, in words."""
    check_overrides(override)
    refused = {name: words for name, words in differences.items() if name not in override}
    if refused:
        raise CheckpointError(
            f"the data state belongs to another stream: {', '.join(refused.values())}; restore the old values, start "
            f"a new run, or allow the difference on purpose: {allowing(*refused)}"
        )


def allowing(*names: str) -> str:
    """How the user sets these overrides, in words."""
    return f"train.resume_override=[{','.join(names)}], or load_state_dict(state, override={list(names)}) in your loop"


def differences(saved: Mapping[str, Any], own: StreamState) -> dict[str, str]:
    """Differences of a saved state from a stream: name of the override that allows each -> the difference, in words."""
    now = own.to_json()
    found: dict[str, str] = {}
    drawn = [state.get("weights") for state in (saved, now)]
    if drawn[0] != drawn[1]:
        found["weights"] = f"the samples' weights were {drawn[0]} and are now {drawn[1]}"
    lanes = [state.get("lanes") for state in (saved, now)]
    if lanes[0] != lanes[1]:
        name = "dataset" if saved.get("samples") != now["samples"] else "lanes"
        found[name] = f"the lanes were {lanes[0]} and are now {lanes[1]}"
    for key in ORDER_KEYS:
        if key not in saved or saved[key] == now[key] or (key == "shuffle" and "weights" in found):
            continue
        name, label = _OVERRIDE_OF.get(key, key), key
        if key == "epoch_size" and "dataset" in found:
            name = "dataset"
        elif key == "epoch_size" and any(drawn):
            name, label = "weights", "num_samples"
        words = f"{label} was {saved[key]} and is now {now[key]}"
        found[name] = f"{found[name]}, {words}" if name in found else words
    return found


def _blend_difference(saved: StreamState, own: StreamState) -> dict[str, str]:
    """How the blend of the saved state differs from the blend of the config.

    Two cases are no difference. The weights of the samples before the state are equal: the weights then change from now
    on. Or the weights after the state are equal: the run was resumed before, and the config has only the new weights.
    """
    before, now = (order.blend if isinstance(order, BlendOrder) else None for order in (saved.order, own.order))
    if before is None and now is None:
        return {}
    if before is None or now is None or before.sizes != now.sizes:
        was, is_now = (
            f"a blend of datasets of {list(blend.sizes)}" if blend else "no blend" for blend in (before, now)
        )
        return {"dataset": f"the dataset was {was} and is now {is_now}"}
    place = saved.place
    if _same_past(before, now, place) or phases_of(_continued(before, place, now)) == phases_of(before):
        return {}
    return {
        "weights": f"weights were {_weights_in_words(before)} and are now {_weights_in_words(now)}, after {place} "
        "samples (to change weights from now on, use `changes` of the BlendedDataset)"
    }


def _same_past(before: Blend, now: Blend, place: int) -> bool:
    return phases_of(before).before(place) == phases_of(now).before(place)


def _continued(before: Blend, place: int, now: Blend) -> Blend:
    """A blend with the weights of `before` up to a place, and those of `now` from the place on."""
    return now if _same_past(before, now, place) else before.continued(place, phases_of(before).before(place), now)


def _weights_in_words(blend: Blend) -> str:
    (_, first), *changes = phases_of(blend).phases
    return ", ".join([str(list(first)), *(f"{list(counts)} from position {start} on" for start, counts in changes)])


def _with_past_weights(saved: StreamState, own: StreamState) -> tuple[StreamState, StreamState, list[str]]:
    """Both states with past weights up to the saved place and new weights after it; and notes for the log."""
    before, now, place = saved.order, own.order, saved.place
    if not isinstance(before, BlendOrder) or not isinstance(now, BlendOrder) or before.blend.sizes != now.blend.sizes:
        return saved, own, []
    blend = _continued(before.blend, place, now.blend)
    notes = []
    if not _same_past(blend, before.blend, place + 1):
        notes.append(
            f"The weights of the blend change: {_weights_in_words(blend)}. Each dataset continues where it was, so "
            "no sample is repeated or left out."
        )
    return replace(saved, order=replace(before, blend=blend)), replace(own, order=replace(now, blend=blend)), notes


def _size_difference(saved: StreamState, own: StreamState) -> dict[str, str]:
    """How the step sizes of the saved state differ from those of the config.

    Two cases are no difference. The sizes of the steps before the state are equal: the size then changes from now on.
    Or the sizes after the state are equal: the run was resumed before, and the config has only the new size.
    """
    before, now, step = saved.schedule, own.schedule, saved.step
    if before is None or now is None or step is None:
        return {}
    if before.is_same(now, before.first_step, step) or now.is_same(before, step):
        return {}
    return {
        "global_batch_size": f"global_batch_size was {_in_words(before)} and is now {_in_words(now)}, after "
        f"{step} steps (to change the size from now on, use train.batch_size_schedule)"
    }


def _in_words(schedule: StepSchedule) -> str:
    sizes = [f"{size} from step {step} on" for step, size in schedule.sizes[1:]]
    return ", ".join([str(schedule.sizes[0][1]), *sizes])


def reconcile(
    saved_json: Mapping[str, Any], own: StreamState, places_to_skip: PlacesToSkip, override: Collection[str]
) -> tuple[StreamState, list[str]]:
    """Find the state from which a stream continues after a saved state.

    Args:
        own: the state of the stream that is to continue, before its first step.
        places_to_skip: schedule -> the places that the stream leaves out on purpose in a run of this schedule.
        override: names of the differences that are allowed; a ConfigError if a name is unknown.

    Returns:
        The state from which the stream continues, and notes on repeated or left-out samples; none if nothing changed.
        A CheckpointError if the saved state belongs to another stream, or is broken.
    """
    saved = StreamState.from_json(saved_json)
    changed = differences(saved_json, own)
    refuse(changed, override)
    refuse({**_size_difference(saved, own), **_blend_difference(saved, own)}, override)
    order = own.order
    saved, own, blend_notes = _with_past_weights(saved, own)
    other_weights = [] if own.order == order else ["the weights of the blend were others in the past"]
    _check_transforms(saved, own, [*changed.values(), *other_weights])
    resumed, notes = _moved(saved, own, changed)
    if own.schedule is not None:
        resumed, step_notes = _with_steps(saved, resumed, own.schedule, places_to_skip)
        notes += step_notes
    return replace(resumed, start=saved.start), blend_notes + notes


def _check_transforms(saved: StreamState, own: StreamState, changes: Sequence[str]) -> None:
    """Raise a CheckpointError if a stream transform could not continue: its outputs depend on the order of samples."""
    if (saved.start is None) != (own.start is None):
        words = ["that of samples" if state.start is None else "that of a stream transform" for state in (saved, own)]
        raise CheckpointError(f"the data state belongs to another stream: it was {words[0]} and is now {words[1]}")
    if own.start is not None and changes:
        raise CheckpointError(
            f"{', '.join(changes)}; but a stream transform continues only in the same order: restore the old values, "
            "or start a new run"
        )


def _moved(saved: StreamState, own: StreamState, changed: Mapping[str, str]) -> tuple[StreamState, list[str]]:
    """The state at the saved place in a stream whose order may have changed on purpose, and notes for the log."""
    if (saved.order.size, saved.order.epoch_size) == (own.order.size, own.order.epoch_size):
        state = StreamState(saved.position, own.order, saved.left_out)
        return state, [_order_note(saved, state, changed)] if saved.order != own.order else []
    epoch, offset = divmod(saved.place, saved.order.epoch_size)
    place = epoch * own.order.epoch_size + round(offset * own.order.epoch_size / saved.order.epoch_size)
    # The places that were left out have no counterpart in the new order.
    state = StreamState(place, own.order)
    return state, [_order_note(saved, state, changed)]


def continued_schedule(saved: StreamState, schedule: StepSchedule) -> StepSchedule:
    """The steps before a saved state with their saved sizes, then the steps of `schedule`."""
    history = saved.schedule if saved.schedule is not None else schedule
    return history.continued(_next_step(history, saved.position), schedule)


def _next_step(history: StepSchedule, position: int) -> int:
    """The first step that uses no sample before a position."""
    step = history.step_at(position)
    return step if history.position_of(step) == position else step + 1


def _with_steps(
    saved: StreamState, state: StreamState, schedule: StepSchedule, places_to_skip: PlacesToSkip
) -> tuple[StreamState, list[str]]:
    """The state with the steps of `schedule` from the saved step on, and notes for the log."""
    history = saved.schedule if saved.schedule is not None else schedule
    notes: list[str] = []
    if saved.order == state.order:
        # The order did not change, so the ledger can still compute the past steps.
        merged = continued_schedule(saved, schedule)
        if not merged.is_same(history, _next_step(history, saved.position)):
            notes.append(
                f"The global batch size changes: {_in_words(merged)}. The stream continues at position "
                f"{saved.position}, so no sample is repeated and none left out."
            )
    else:
        merged = schedule.begun_at(history.step_at(saved.position), state.position)
    skipped = places_to_skip(merged).since(state.place)
    left_out = state.left_out.joined(skipped)
    new = left_out.count_before(1 << 62) - state.left_out.count_before(1 << 62)
    if new:
        ranges = ", ".join(f"[{first}, {end})" for first, end in skipped.ranges)
        notes.append(
            f"train.skip_steps leaves out {new} samples more, at places {ranges} of the order; the run has passed "
            f"place {state.place}, so samples before it cannot be left out any more."
        )
    return StreamState(state.position, state.order, left_out, merged), notes


def _order_note(saved: StreamState, state: StreamState, changed: Mapping[str, str]) -> str:
    """The note on how a change of the order affects the current epoch."""
    epoch, taken = divmod(saved.place, saved.order.epoch_size)
    offset = state.place - epoch * state.order.epoch_size
    what = ", ".join(changed.values()) or "the order changed"
    head = f"Resuming on purpose although {what}: the run continues in epoch {epoch} after {offset} of its "
    head += f"{state.order.epoch_size} samples"
    if isinstance(state.order, BlendOrder):
        return f"{head}; each dataset of the blend continues in another order after the same share of its epoch."
    if isinstance(state.order, WeightedOrder):
        return f"{head}; the next samples are drawn by the new weights."
    if not taken:
        return f"{head}, at its beginning, so nothing is repeated and nothing left out."
    if saved.order.size != state.order.size and not (saved.order.shuffle or state.order.shuffle):
        return f"{head}, at the same share of the data: nothing is repeated or left out, except for rounding."
    return f"{head}. Some samples are used twice in this epoch, and others never; later epochs are complete."
