"""The state of a loader over an iterable: its keys, and whether its parts fit together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libai_data.errors import CheckpointError
from libai_data.errors.argument_rules import BATCH_SIZE, EPOCH, INT, MAPPING, TEXT, one_of, or_none, whole
from libai_data.errors.saved_state import Keys

STATE = Keys(
    {"position": whole(0), "ends": one_of("short", "pad", "drop", "cycle")},
    {
        "epoch": EPOCH,
        "reading": Keys({"num_shards": BATCH_SIZE}, {"shuffle_buffer": BATCH_SIZE, "seed": INT}),
        "dataset": or_none(MAPPING),
        "iterable": Keys(
            {},
            {
                "epoch": EPOCH,
                "num_shards": BATCH_SIZE,
                "global_batch_size": BATCH_SIZE,
                "rows_digests": MAPPING,
                "row": whole(0),
                "rows_digest": TEXT,
                "source": Keys({"row": whole(0), "state": TEXT}, {"rows_digest": TEXT, "length": whole(0)}),
            },
        ),
    },
)
"""The keys of the state of a loader over an iterable."""


def check_place(state: Mapping[str, Any]) -> None:
    """Raise an error if the parts of a loader's state, with the keys of `STATE`, contradict each other."""
    details, position, endless = state.get("iterable", {}), state["position"], state["ends"] == "cycle"
    # A rank that does not read saves no 'iterable'.
    begun = details.get("epoch", state.get("epoch", 0))
    row, mark = details.get("row"), details.get("source", {}).get("row", 0)
    contradictions = []
    if row is not None and position:
        # In an endless stream, rows count from the beginning of their epoch, and positions from the beginning of the
        # first epoch. Each epoch has at least one row.
        if (row != position and (begun == 0 or not endless)) or row > position - begun * endless:
            contradictions.append(f"position is {position}, but iterable.row is {row} of epoch {begun}")
        if mark > row:
            contradictions.append(f"iterable.source.row is {mark}, behind iterable.row {row}")
    if not endless and begun != state.get("epoch", begun):
        contradictions.append(f"epoch is {state['epoch']}, but iterable.epoch is {begun}")
    if contradictions:
        raise CheckpointError(
            f"the data state contradicts itself: {'; '.join(contradictions)}. Restore a state that was not edited, or "
            "delete 'iterable' from the state, so that the loader counts rows up to the position"
        )
