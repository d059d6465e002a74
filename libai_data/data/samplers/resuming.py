"""Resuming: whether a saved state fits a stream, and what happens to the samples where it differs on purpose."""

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
"""What a resumed run may change if it is told so, as in `train.resume_override=[seed]`."""

RESTART_DATA = "restart_data"
"""Names in `train.resume_override` that the train loader begins anew, or resumes by itself."""

_OVERRIDE_OF = {"samples": "dataset", "epoch_size": "drop_last"}

PlacesToSkip = Callable[[StepSchedule], LeftOut]


def check_overrides(override: Collection[str]) -> None:
    """Refuse names that are not in `OVERRIDES`; a trainer that is told `RESTART_DATA` restores nothing."""
    if isinstance(override, str) or not isinstance(override, Collection):
        raise ConfigError(f"override is {override!r:.100}; it must be a list of names, such as ['seed']")
    for name in override:
        if name not in OVERRIDES:
            known = [*OVERRIDES, RESTART_DATA]
            raise ConfigError(
                f"resume_override names {name!r}; allowed: {list(OVERRIDES)}, and in a trainer {RESTART_DATA!r}."
                f"{nearest(name, known)}"
            )


def refuse(differences: Mapping[str, str], override: Collection[str]) -> None:
    """Refuse a saved state that differs in what it must not.

    Args:
        differences: name of the override that would allow it -> what differs, in words.
        override: what may differ.
    """
    check_overrides(override)
    refused = {name: words for name, words in differences.items() if name not in override}
    if refused:
        raise CheckpointError(
            f"the data state belongs to another stream: {', '.join(refused.values())}; restore the old values, start "
            f"a new run, or allow the difference on purpose: {allowing(*refused)}"
        )


def allowing(*names: str) -> str:
    """How to allow what these overrides allow, in words."""
    return f"train.resume_override=[{','.join(names)}], or load_state_dict(state, override={list(names)}) in your loop"


def differences(saved: Mapping[str, Any], own: StreamState) -> dict[str, str]:
    """How a saved state differs from a stream: name of the override that would allow it -> what, in words."""
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
    """Whether datasets were blended otherwise than the config says.

    Weights may change from now on: then the config tells the truth of what is done. A config that names but the new
    weights was resumed with before: then it tells the truth of what is to come.
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
    """The weights that the past had before a place, and those that the future is to have."""
    return now if _same_past(before, now, place) else before.continued(place, phases_of(before).before(place), now)


def _weights_in_words(blend: Blend) -> str:
    (_, first), *changes = phases_of(blend).phases
    return ", ".join([str(list(first)), *(f"{list(counts)} from position {start} on" for start, counts in changes)])


def _with_past_weights(saved: StreamState, own: StreamState) -> tuple[StreamState, StreamState, list[str]]:
    """Both states with the weights that the past had and the future is to have, and what there is to note of it."""
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
    """Whether the steps were of other sizes than the config says.

    They may change from now on: then the config tells the truth of the steps that are done. A config that names but the
    new size was resumed with before: then it tells the truth of those to come.
    """
    before, now, step = saved.schedule, own.schedule, saved.step
    if before is None or now is None or step is None or before.same_before(step, now) or now.same_from(step, before):
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
    """Find where a stream goes on from a saved state.

    Args:
        saved_json: the saved state.
        own: the state of the stream that is to go on, before its first step.
        places_to_skip: what it leaves out in a run of a given schedule.
        override: what may differ.

    Returns:
        The state to go on from, and notes on what is repeated or left out, none if nothing changed.

    Raises:
        CheckpointError: The saved state belongs to another stream, or is broken.
        ConfigError: `override` names something unknown.
    """
    saved = StreamState.from_json(saved_json)
    changed = differences(saved_json, own)
    refuse(changed, override)
    refuse({**_size_difference(saved, own), **_blend_difference(saved, own)}, override)
    order = own.order
    saved, own, blend_notes = _with_past_weights(saved, own)
    other_weights = [] if own.order == order else ["the weights of the blend were others in the past"]
    _check_transforms(saved, own, [*changed.values(), *other_weights])
    if own.schedule is None:
        resumed, notes = _moved(saved, own, changed)
        return StreamState(resumed.position, own.order, resumed.left_out, start=saved.start), blend_notes + notes
    resumed, notes = _with_steps(saved, own, own.schedule, places_to_skip, changed)
    return replace(resumed, start=saved.start), blend_notes + notes


def _check_transforms(saved: StreamState, own: StreamState, changes: Sequence[str]) -> None:
    """Refuse what cannot be gone on with, since outputs of a transform are made of several samples in their order."""
    if (saved.start is None) != (own.start is None):
        words = ["that of samples" if state.start is None else "that of a stream transform" for state in (saved, own)]
        raise CheckpointError(f"the data state belongs to another stream: it was {words[0]} and is now {words[1]}")
    if own.start is not None and changes:
        raise CheckpointError(
            f"{', '.join(changes)}; but a stream transform continues only in the same order: restore the old values, "
            "or start a new run"
        )


def _moved(saved: StreamState, own: StreamState, changed: Mapping[str, str]) -> tuple[StreamState, list[str]]:
    """The saved place in a stream whose order has changed on purpose."""
    if (saved.order.size, saved.order.epoch_size) == (own.order.size, own.order.epoch_size):
        state = StreamState(saved.position, own.order, saved.left_out)
        return state, [_order_note(saved, state, changed)] if saved.order != own.order else []
    epoch, offset = divmod(saved.place, saved.order.epoch_size)
    place = epoch * own.order.epoch_size + round(offset * own.order.epoch_size / saved.order.epoch_size)
    # What was left out has no place in the new order.
    state = StreamState(place, own.order)
    return state, [_order_note(saved, state, changed)]


def continued_schedule(saved: StreamState, schedule: StepSchedule) -> StepSchedule:
    """The steps that were done before a saved state, and those of a schedule from there on."""
    history = saved.schedule if saved.schedule is not None else schedule
    return history.continued(_next_step(history, saved.position), schedule)


def _next_step(history: StepSchedule, position: int) -> int:
    """The first step of which nothing is taken before a position."""
    step = history.step_at(position)
    return step if history.position_of(step) == position else step + 1


def _with_steps(
    saved: StreamState,
    own: StreamState,
    schedule: StepSchedule,
    places_to_skip: PlacesToSkip,
    changed: Mapping[str, str],
) -> tuple[StreamState, list[str]]:
    history = saved.schedule if saved.schedule is not None else schedule
    state, notes = _moved(saved, own, changed)
    if saved.order == own.order:
        # The order of the steps that are done still holds, so that they stay in the ledger.
        merged = continued_schedule(saved, schedule)
        if not merged.same_from(_next_step(history, saved.position), history):
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
            f"train.skip_steps leaves out {new} samples more, at places {ranges} of the order; what was taken before "
            f"place {state.place} cannot be left out any more."
        )
    return StreamState(state.position, own.order, left_out, merged), notes


def _order_note(saved: StreamState, state: StreamState, changed: Mapping[str, str]) -> str:
    """What a change of the order does to the epoch in which it happens."""
    epoch, taken = divmod(saved.place, saved.order.epoch_size)
    offset = state.place - epoch * state.order.epoch_size
    what = ", ".join(changed.values()) or "the order changed"
    head = f"Resuming on purpose although {what}: the run continues in epoch {epoch} after {offset} of its "
    head += f"{state.order.epoch_size} samples"
    if isinstance(state.order, BlendOrder):
        return f"{head}; each dataset of the blend continues in another order after the same share of its epoch."
    if isinstance(state.order, WeightedOrder):
        return f"{head}; what follows is drawn by the new weights."
    if not taken:
        return f"{head}, at its beginning, so nothing is repeated and nothing left out."
    if saved.order.size != state.order.size and not (saved.order.shuffle or state.order.shuffle):
        return f"{head}, at the same share of the data: nothing is repeated or left out, except for rounding."
    return f"{head}. Some samples are used twice in this epoch, and others never; later epochs are complete."
