"""A loop that a user wrote, with nothing but a loader and `to_global`: `own_loop.py CASE:RANK READERS FOLDER`.

Just before something goes wrong on the rank, the time is written to `FOLDER/fault`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow

from libai_data import build_nlp_train_loader, from_iterable
from libai_data.config import LazyCall
from libai_data.delivery import to_global
from libai_data.mesh.peers import main_thread
from libai_data.mesh.peers.liveness import watch_over_ranks

CASE, _, WHERE = sys.argv[1].partition(":")
READERS, FOLDER = sys.argv[2:4]
RANK, WORLD_SIZE = flow.env.get_rank(), flow.env.get_world_size()
HERE = str(RANK) == WHERE
STEPS = 8
FAULT_AT = 5


def is_time_for(case: str) -> bool:
    if not HERE or case != CASE:
        return False
    Path(FOLDER, "fault").write_text(repr(time.time()))
    return True


class Samples:
    """A sample may be broken on one rank."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Any]:
        if is_time_for("sample"):
            raise OSError(f"sample {index} cannot be read")
        return {"x": np.full(8, index, np.float32)}


if CASE in ("break", "break, but a thread goes on"):
    main_thread.SECONDS_TO_WAIT = 4.0
loader: Any = None
if is_time_for("exit before the loop"):
    sys.exit(0)
if READERS == "iterable":
    loader = from_iterable(Samples(), 2)
elif READERS == "stream+node":
    # A thread of the reading rank reads it ahead, also when the loop is over.
    loader = from_iterable(lambda: ({"x": np.full(8, index, np.float32)} for index in range(400)), 2, readers="node")
else:
    loader = build_nlp_train_loader(LazyCall(Samples)(), 2, num_workers=0, readers=READERS)[0]
everyone = flow.placement("cpu", list(range(WORLD_SIZE)))
batches = iter(loader)
for step, batch in zip(range(STEPS), batches):
    if step == FAULT_AT:
        if is_time_for("skip a batch"):
            continue
        if is_time_for("take one more"):
            batch = next(batches)
        if is_time_for("break"):
            break
        if is_time_for("break, but a thread goes on"):
            threading.Thread(target=time.sleep, args=(1000,), name="my own").start()
            break
        if is_time_for("exit") or is_time_for("exit, and the others know"):
            sys.exit(0)
        while CASE == "exit, and the others know" and not watch_over_ranks()._leaving.after:
            time.sleep(0.01)
        if is_time_for("raise"):
            sys.excepthook = lambda *error: print("a hook of the user's own:", error[1])
            raise RuntimeError("the model is broken")
    tensors = to_global(batch)
    if step == FAULT_AT and is_time_for("break in a step"):
        break
    # As a training step does, it waits for all ranks.
    tensors["x"].to_global(placement=everyone, sbp=flow.sbp.broadcast).to_local().numpy()
if CASE == "late" and HERE:
    # Longer than ranks may wait for one that has left: this one needs nobody any more.
    time.sleep(8)
    print("the slowest rank is done")
if is_time_for("caught"):
    with contextlib.suppress(SystemExit):
        sys.exit(3)
to_global(batch)
print(f"rank {RANK} is at its end")
if is_time_for("exit 3 at the end"):
    sys.exit(3)
