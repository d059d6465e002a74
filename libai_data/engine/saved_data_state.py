"""The data state in a checkpoint on disk: described in words, and edited with a backup."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.data.samplers.ledger import MOST_STEPS
from libai_data.data.samplers.schedule import LeftOut, StepSchedule, left_out_by
from libai_data.data.samplers.stream_state import StreamState
from libai_data.engine.checkpoint.directory import LAST, MANIFEST, PendingDirectory, verify
from libai_data.engine.checkpoint.folder import STATE, read_last, read_state
from libai_data.errors import CheckpointError, ConfigError
from libai_data.errors.argument_rules import check, whole

_SHOWN = 8


@dataclass(frozen=True)
class SavedState:
    """The contents of a checkpoint's `state.json`, and the state of its stream."""

    path: Path
    content: dict[str, Any]
    stream: StreamState

    @staticmethod
    def read(path: str) -> SavedState:
        """Read an intact checkpoint, or the last one of an output folder; a CheckpointError if there is none."""
        directory = Path(path)
        if (directory / LAST).is_file():
            directory = directory / read_last(directory)
        verify(directory)
        content = read_state(directory)
        data = content["stateful"].get("train_loader")
        if not isinstance(data, dict) or "order_version" not in data:
            raise CheckpointError(f"{directory} has no data state of libai_data's endless stream, but {data}")
        return SavedState(directory, content, StreamState.from_json(data))

    @property
    def data(self) -> dict[str, Any]:
        """The state of the train loader."""
        data: dict[str, Any] = self.content["stateful"]["train_loader"]
        return data

    @property
    def step(self) -> int:
        """The step that a run from this checkpoint continues with."""
        return int(self.content["iteration"]) + 1

    @property
    def schedule(self) -> StepSchedule:
        """The sizes of the steps; raises CheckpointError if they are not known."""
        if self.stream.schedule is None:
            raise CheckpointError(f"the data state of {self.path} has no steps: {self.data}")
        return self.stream.schedule


def in_words(saved: SavedState) -> list[str]:
    """Lines that describe where a run would continue from a checkpoint."""
    stream, order, mesh = saved.stream, saved.stream.order, saved.content.get("mesh", {})
    epoch, offset = divmod(stream.place, order.epoch_size)
    shown = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    used = saved.content["stateful"].get("hook IterationTimer", {}).get("samples", stream.position)
    lines = [
        f"Checkpoint {saved.path}, written after {saved.step} steps" + (f" on a mesh of {shown}." if shown else "."),
        *_step_in_words(saved),
        f"Used so far: {used} samples, on all ranks together. Epoch {epoch} is at {offset} of "
        f"{order.epoch_size} samples ({offset / order.epoch_size:.1%}); the next epoch begins after "
        f"{order.epoch_size - offset} more.",
        f"Dataset: {_dataset_in_words(saved.data)}, {order.size} samples, {order.in_words()}.",
    ]
    if stream.left_out.ranges:
        passed = stream.left_out.count_before(stream.place)
        to_come = stream.left_out.since(stream.place)
        ranges = ", ".join(f"{first} to {end - 1}" for first, end in stream.left_out.ranges)
        total = passed + sum(end - first for first, end in to_come.ranges)
        lines.append(
            f"Left out on purpose: {total} samples, at places {ranges} of the order; {passed} of them before the "
            f"current place, {total - passed} after it."
        )
    if stream.start is not None:
        places = stream.place + np.arange(_SHOWN)
    else:
        places = stream.left_out.places_of(stream.position + np.arange(_SHOWN))
    if order.can_locate:
        _, indices = order.locate(places)
        lines.append(f"Next samples: {', '.join(map(str, indices.tolist()))}, ...")
    lines.append(f"The data state has {len(json.dumps(saved.data))} bytes.")
    return lines


def _step_in_words(saved: SavedState) -> list[str]:
    schedule = saved.stream.schedule
    if schedule is None:
        return [
            f"A resume continues with step {saved.step} at position {saved.stream.position}; the sizes of steps are "
            "not known."
        ]
    size = schedule.size_of(saved.step)
    sizes = ", ".join(f"{size} from step {step} on" for step, size in schedule.sizes)
    first = schedule.first_step
    lines = [
        f"A resume continues with step {saved.step}, which uses {size} samples from position {saved.stream.position} "
        "on.",
        f"Global batch size: {sizes}.",
    ]
    if saved.stream.left_out.ranges:
        uncut = schedule.step_at(saved.stream.place)
        lines.append(
            f"In a run without skips, these samples belong to step {uncut} and later; train.skip_steps counts such "
            "steps."
        )
    if first:
        lines.append(
            f"The samples of a step are known only from step {first} on, because the order was changed on purpose "
            "there."
        )
    return lines


def _dataset_in_words(data: Mapping[str, Any]) -> str:
    fingerprint = data.get("dataset") or {}
    name = str(fingerprint.get("name", "unknown"))
    sources = sources_of(data)
    if len(sources) > 1:
        return f"{name} of " + ", ".join(f"{source} ({length})" for source, length in sources)
    return f"{name} (content {fingerprint['content']})" if "content" in fingerprint else name


def sources_of(data: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Name and length of each part of a concatenated dataset, if the fingerprint has them; else of the dataset."""
    fingerprint = data.get("dataset") or {}
    content = fingerprint.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and {"name", "samples"} <= set(part) for part in content
    ):
        return [(str(part["name"]), int(part["samples"])) for part in content]
    return [(str(fingerprint.get("name", "dataset")), int(data["samples"]))]


def source_of(sources: Sequence[tuple[str, int]], index: int) -> tuple[str, int]:
    """The name of a sample's source (with a number if there are several), and the sample's index in this source."""
    start = 0
    for number, (name, length) in enumerate(sources):
        if index < start + length:
            return (f"{number}:{name}" if len(sources) > 1 else name), index - start
        start += length
    raise IndexError(f"sample {index} is outside a dataset of {start} samples")


def edited(
    saved: SavedState,
    position: int | None = None,
    seed: int | None = None,
    skips: Sequence[tuple[int, int]] = (),
    forget_skips: bool = False,
) -> StreamState:
    """Make a changed data state, with the same next step. After a change of position or seed, the ledger begins there.

    Args:
        position: samples used so far; the stream continues there.
        seed: seed of the order from the next sample on.
        skips: (first step, last step), both included, to come, whose samples are also left out.
        forget_skips: remove the skips that are still to come.
    """
    state, schedule = saved.stream, saved.schedule
    if state.start is not None and (skips or seed is not None or position is not None):
        raise ConfigError(
            "the data state is that of a stream transform, such as a packer; its place, order and steps depend on the "
            "lengths of samples, and cannot be edited"
        )
    if forget_skips:
        past = tuple(r for r in state.left_out.ranges if r[0] < state.place)
        state = replace(state, left_out=LeftOut(past))
    if position is not None:
        check({"position": whole(0, MOST_STEPS)}, position=position)
        state = replace(state, position=position)
    if seed is not None:
        state = replace(state, order=replace(state.order, seed=seed))
    if position is not None or seed is not None:
        schedule = schedule.begun_at(saved.step, state.position)
    left_out = state.left_out
    for first, last in skips:
        is_range = 0 <= first <= last <= MOST_STEPS
        added = left_out_by([(first, last)], schedule).since(state.place) if is_range else LeftOut()
        if not added.ranges:
            raise ConfigError(
                f"steps {first} to {last} cannot be skipped: give the first and last step to skip, after those that "
                "are done. Count the steps of a run without skips; there, the next sample belongs to step "
                f"{schedule.step_at(state.place)}"
            )
        left_out = left_out.joined(added)
    return replace(state, left_out=left_out, schedule=schedule)


def write_edited(saved: SavedState, stream: StreamState) -> Path:
    """Replace a checkpoint's data state; returns the directory of the backup, a complete checkpoint.

    If the file system has hard links, both directories share the files that do not change.
    """
    names = (saved.path.with_name(f"{saved.path.name}.before_edit_{number}") for number in count(1))
    backup = next(path for path in names if not path.exists())
    files = list(json.loads((saved.path / MANIFEST).read_text(encoding="utf-8"))["files"])
    data = {key: value for key, value in saved.data.items() if key == "dataset"}
    stateful = {**saved.content["stateful"], "train_loader": {**stream.to_json(), **data}}
    try:
        with PendingDirectory(backup) as kept, PendingDirectory(saved.path) as changed:
            for name in files:
                kept.add_same(name, saved.path)
                if name != STATE:
                    changed.add_same(name, saved.path)
            changed.add_json(STATE, {**saved.content, "stateful": stateful})
            kept.commit()
            changed.commit()
    except OSError as error:
        raise CheckpointError(f"{saved.path} could not be changed, and is the same as before: {error}") from error
    return backup
