"""Loads iterables in every read mode, on some meshes: `iterables_on_ranks.py FOLDER MESH...`.

Each rank writes `FOLDER/<rank>.json`: mesh -> scenario -> read mode -> what it saw, and which error it got in each case
of a failing iterable.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Callable

import numpy as np
import oneflow as flow

from libai_data.delivery import to_global
from libai_data.errors import DataPipelineError
from libai_data.iterables import FilteredStream, MappedStream, PackedStream, default_collate, from_iterable
from libai_data.mesh.current import get_mesh, set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.structures import batch_info
from tests.deadline import stretched
from tests.iterables.rows import Stateful, numbers, rows_of, sample

FOLDER = Path(sys.argv[1])
RANK, WORLD_SIZE, NODES = flow.env.get_rank(), flow.env.get_world_size(), flow.env.get_node_size()
MODES = ("every_rank", "node", "rank0")
GLOBAL_BATCH = 8
GIVEN_UP = threading.Event()
"""Until then an iterable hangs."""


def micro_batch() -> int:
    return GLOBAL_BATCH // get_mesh().data_parallel_size


def drained(loader: Any, count: int) -> list[Any]:
    """Place and own rows of the next batches, which are made global too."""
    found = []
    for batch in islice(iter(loader), count):
        info = batch_info(batch)
        assert info is not None
        assert to_global(batch)["y"].shape[0] == GLOBAL_BATCH
        found.append([info.epoch, info.position, info.valid, rows_of(batch)])
    return found


def loaded(source: Any, count: int, **options: Any) -> list[Any]:
    loader = from_iterable(source, micro_batch(), check_every=2, **{"ends": "drop", **options})
    found = drained(loader, count)
    loader.close()
    return found


def batches(size: int) -> Callable[..., Iterator[Any]]:
    """A factory of batches of `numbers`."""

    def made(epoch: int) -> Iterator[Any]:
        rows = list(numbers(epoch))
        return (default_collate(rows[start : start + size]) for start in range(0, len(rows), size))

    return made


def nested() -> Iterator[Any]:
    for number in range(16):
        yield {**sample(number), "inner": {"text": "x" * number, "ids": (np.full(3, number),)}}


def texts(readers: str) -> list[Any]:
    loader = from_iterable(nested, micro_batch(), readers=readers)
    found = []
    for batch in loader:
        inner = to_global(batch)["inner"]
        assert [len(text) for text in inner["text"]] == rows_of(batch)
        assert tuple(inner["ids"][0].shape) == (GLOBAL_BATCH, 3)
        found.append([0, 0, GLOBAL_BATCH, rows_of(batch)])
    loader.close()
    return found


def resumed(readers: str, source: Any = numbers, **how: Any) -> list[Any]:
    """The stream from its fourth batch on, stopped in another read mode."""
    stopped = from_iterable(source, micro_batch(), ends="cycle", readers=MODES[MODES.index(readers) - 1], **how)
    drained(stopped, 3)
    kept = FOLDER / f"state-{get_mesh().data_parallel_size}-{readers}-{len(how)}"
    if RANK == 0:
        kept.write_text(json.dumps(stopped.state_dict()))
    flow.comm.barrier()
    stopped.close()
    loader = from_iterable(source, micro_batch(), ends="cycle", readers=readers, **how)
    loader.load_state_dict(json.loads(kept.read_text()))
    found = drained(loader, 4)
    loader.close()
    return found


def units(epoch: int) -> Iterator[Any]:
    """`numbers`, each of one token."""
    return ({"x": each["x"].reshape(1, 6), "y": np.array([each["y"]])} for each in numbers(epoch))


def decoded(row: Any) -> Any:
    if row["y"] % 7 == 3:
        raise OSError(f"row {row['y']} is truncated")
    return row


def shards(shard: int, num_shards: int) -> Iterator[Any]:
    """Every `num_shards`-th of 30 samples; the shards are of unequal lengths."""
    yield from (sample(number) for number in range(shard, 30, num_shards))


SCENARIOS: dict[str, Callable[[str], list[Any]]] = {
    "samples, cycle": lambda readers: loaded(numbers, 7, ends="cycle", readers=readers),
    "samples, drop": lambda readers: loaded(numbers, 7, ends="drop", readers=readers),
    "samples, pad": lambda readers: loaded(numbers, 7, ends="pad", readers=readers),
    "batches": lambda readers: loaded(batches(5), 7, batches=True, ends="cycle", readers=readers),
    "map-style": lambda readers: loaded(list(map(sample, range(22))), 7, ends="cycle", shuffle=True, readers=readers),
    "texts": texts,
    "resumed": resumed,
    "interleaved": lambda readers: loaded(
        shards, 4, num_shards=3, num_workers=1 if WORLD_SIZE > 1 else 0, shuffle_buffer=6, seed=2, readers=readers
    ),
    "packed": lambda readers: loaded(
        PackedStream(FilteredStream(units, lambda each: each["y"][0] % 5 > 0), 1), 7, ends="cycle", readers=readers
    ),
    "failing rows": lambda readers: resumed(readers, MappedStream(Stateful(30), decoded), on_error="skip"),
    "resumed shards": lambda readers: resumed(readers, Stateful(30), num_shards=2, shuffle_buffer=4),
    "shards, drop": lambda readers: loaded(shards, 9, ends="drop", readers=readers),
    "shards, cycle": lambda readers: loaded(shards, 9, ends="cycle", readers=readers),
}


def raises(rank: int) -> Any:
    def breaks() -> Iterator[Any]:
        yield from (sample(number) for number in range(20))
        if rank in (RANK, -1):
            raise OSError("the disk is gone")
        yield from (sample(number) for number in range(20, 60))

    return breaks


def ends_early() -> Iterator[Any]:
    yield from (sample(number) for number in range(20 if RANK == 1 else 60))


def differs() -> Iterator[Any]:
    yield from (sample(number + (RANK == 1)) for number in range(60))


def skips() -> Iterator[Any]:
    """Leaves out one row on rank 1, as a library does that skips bad samples."""
    yield from (sample(number) for number in range(400) if not (RANK == 1 and number == 230))


def skips_at_the_end() -> Iterator[Any]:
    """The same, but the round has as many rows on each rank, and the next begins within the batch."""
    yield from (sample(number) for number in range(22 + (RANK == 1)) if not (RANK == 1 and number == 20))


def changes(shard: int = 0, num_shards: int = 1) -> Iterator[Any]:
    """One value of a large field differs on rank 1, late."""
    for number in range(200):
        x = np.full(20_000, number, np.float32)
        x[15_001] += RANK == 1 and number == 90
        yield {"x": x, "y": number}


def hangs() -> Iterator[Any]:
    yield from (sample(number) for number in range(20))
    if RANK == 0:
        GIVEN_UP.clear()
        GIVEN_UP.wait()
    yield from (sample(number) for number in range(20, 60))


def opens() -> Any:
    if RANK == 0:
        raise FileNotFoundError("no such bucket")
    return iter(())


FAULTS: dict[str, Callable[[str], Any]] = {
    "raises on all": lambda readers: loaded(raises(-1), 9, readers=readers),
    "raises on rank 0": lambda readers: loaded(raises(0), 9, readers=readers),
    "raises on rank 1": lambda readers: loaded(raises(1), 9, readers=readers),
    "ends early on rank 1": lambda readers: loaded(ends_early, 9, readers=readers),
    "differs on rank 1": lambda readers: loaded(differs, 9, readers=readers),
    "skips a row on rank 1": lambda readers: loaded(skips, 40, readers=readers),
    "skips a row at the end on rank 1": lambda readers: loaded(skips_at_the_end, 9, readers=readers, ends="cycle"),
    "changes a value on rank 1": lambda readers: first_batches(lambda: changes(), 40, readers),
    "hangs on rank 0": lambda readers: loaded(hangs, 9, readers=readers, timeout=stretched(1.5)),
    "cannot be opened on rank 0": lambda readers: loaded(opens, 9, readers=readers),
}


def first_batches(source: Any, count: int, readers: str) -> list[Any]:
    loader = from_iterable(source, micro_batch(), readers=readers, check_every=0, ends="drop")
    found = list(islice(loader, count))
    loader.close()
    return found


def error_of(case: Callable[[str], Any], readers: str) -> str:
    """The error that a case ends with, or how many batches came."""
    try:
        return f"{len(case(readers))} batches"
    except DataPipelineError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        GIVEN_UP.set()


def main() -> None:
    found: dict[str, Any] = {"meshes": {}, "faults": {}}
    for mesh in sys.argv[2:]:
        data, tensor, pipeline = map(int, mesh.split("x"))
        set_mesh(ParallelMesh(data, tensor, pipeline, rank=RANK, num_nodes=NODES))
        found["meshes"][mesh] = {
            name: {readers: [get_mesh().data_parallel_rank, scenario(readers)] for readers in MODES}
            for name, scenario in SCENARIOS.items()
        }
    if WORLD_SIZE > 1:
        set_mesh(ParallelMesh(WORLD_SIZE, 1, 1, rank=RANK, num_nodes=NODES))
        found["faults"] = {
            name: {readers: error_of(case, readers) for readers in MODES} for name, case in FAULTS.items()
        }
        # Tensor peers go through one shard.
        set_mesh(ParallelMesh(WORLD_SIZE // 2, 2, 1, rank=RANK, num_nodes=NODES))
        found["peers"] = error_of(lambda readers: first_batches(changes, 40, readers), "every_rank")
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
