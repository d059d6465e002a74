"""Plants faults on 2x2 ranks and notes how each is named: `contract_faults.py FOLDER`.

Each rank writes `FOLDER/<rank>.json`: for each fault the step and the error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Callable

import numpy as np
import oneflow as flow

from libai_data import DataLoader
from libai_data.data.samplers import CyclicSampler
from libai_data.delivery import to_global
from libai_data.errors import DataPipelineError
from libai_data.mesh.current import get_mesh, set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.mesh.peers.liveness import watch_over_ranks
from libai_data.structures import DistTensorData, Instance

RANK = flow.env.get_rank()
CHECK_EVERY = 4
FAULT_AT = 2
STEPS = 7
SEED = 5


class Samples:
    """Two fields of the same shape and one number; `alter` may change a sample's arrays."""

    def __init__(self, samples: int = 50, alter: Callable[[int, dict[str, np.ndarray]], None] | None = None) -> None:
        self.samples = samples
        self.alter = alter

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Instance:
        rng = np.random.default_rng(index)
        arrays = {name: rng.integers(0, 1000, (6,)) for name in ("tokens", "labels")}
        arrays["number"] = np.asarray(index)
        if self.alter is not None:
            self.alter(index, arrays)
        return Instance(**{name: DistTensorData(array) for name, array in arrays.items()})


Batches = Iterator[Instance]
Plant = Callable[[], Batches]
Tensors = dict[str, Any]


def batches_of(
    dataset: Any = None,
    micro_batch: int = 4,
    seed: int = SEED,
    shuffle: bool = True,
    shard: int = -1,
    consumed: int = 0,
    **options: Any,
) -> Batches:
    """This rank's stream, with one or the other mistake in it."""
    dataset = dataset or Samples()
    mesh = get_mesh()
    data_rank = mesh.data_parallel_rank if shard < 0 else shard
    sampler = CyclicSampler(dataset, micro_batch, shuffle, consumed, data_rank, mesh.data_parallel_size, seed)
    return iter(DataLoader(dataset, sampler, check_every=CHECK_EVERY, **options))


def on(*ranks: int) -> bool:
    return RANK in ranks


def skipping() -> Batches:
    batches = batches_of()
    for step in range(STEPS):
        if on(3) and step == FAULT_AT:
            next(batches)
        yield next(batches)


def repeating() -> Batches:
    batches, last = batches_of(), None
    for step in range(STEPS):
        # What came is given again, and so it is behind from then on.
        batch = last if on(1) and step == FAULT_AT else next(batches)
        assert batch is not None
        last = batch
        yield batch


def changing(change: Callable[[Instance, Tensors], None], *ranks: int) -> Plant:
    """From `FAULT_AT` on, change each batch on these ranks, given the tensors of the one before."""

    def plant() -> Batches:
        last: Tensors = {}
        for step, batch in enumerate(batches_of()):
            original = {name: data.tensor.clone() for name, data in batch.get_fields().items()}
            if RANK in ranks and step >= FAULT_AT:
                change(batch, last)
            last = original
            yield batch

    return plant


def set_tensor(batch: Instance, name: str, tensor: Any) -> None:
    batch.set(name, DistTensorData(tensor))


def swap_fields(batch: Instance, last: Tensors) -> None:
    tokens, labels = batch.get("tokens").tensor, batch.get("labels").tensor
    set_tensor(batch, "tokens", labels)
    set_tensor(batch, "labels", tokens)


def stale_memory(batch: Instance, last: Tensors) -> None:
    set_tensor(batch, "tokens", last["tokens"])


def lost_row(batch: Instance, last: Tensors) -> None:
    tokens = batch.get("tokens").tensor.numpy().copy()
    tokens[-1] = 0
    set_tensor(batch, "tokens", flow.from_numpy(tokens))


def flip_a_bit(batch: Instance, last: Tensors) -> None:
    tokens = batch.get("tokens").tensor.numpy().copy()
    tokens[2, 3] ^= 1
    set_tensor(batch, "tokens", flow.from_numpy(tokens))


def swap_rows(batch: Instance, last: Tensors) -> None:
    set_tensor(batch, "labels", flow.from_numpy(batch.get("labels").tensor.numpy()[::-1].copy()))


def in_place(batch: Instance, last: Tensors) -> None:
    set_tensor(batch, "tokens", batch.get("tokens").tensor + 1)


def another_dtype(batch: Instance, last: Tensors) -> None:
    set_tensor(batch, "tokens", batch.get("tokens").tensor.to(flow.int32))


def rank_state() -> Batches:
    rng = np.random.default_rng(RANK)

    def alter(index: int, arrays: dict[str, np.ndarray]) -> None:
        arrays["tokens"] += rng.integers(0, 2, 6)

    return batches_of(Samples(alter=alter))


def failing_once() -> Batches:
    """On rank 1, one sample of the batch of step 2 cannot be read. The first sample is read twice."""
    reads = count(-1)

    def alter(index: int, arrays: dict[str, np.ndarray]) -> None:
        if next(reads) == 4 * FAULT_AT + 1 and on(1):
            raise OSError("the disk is busy")

    return batches_of(Samples(alter=alter), on_error="skip", replacement_budget=1.0)


def next_number(index: int, arrays: dict[str, np.ndarray]) -> None:
    arrays["number"] += 1


def swapped_loaders() -> Batches:
    of_samples, of_others = batches_of(), batches_of(Samples(alter=next_number))
    return of_others if on(2, 3) else of_samples


def listed(change: Callable[[list[list[int]]], None]) -> Plant:
    """Lists of a sampler of the user's own, changed on ranks 2 and 3, which are another shard."""

    def plant() -> Batches:
        first = 28 * on(2, 3)
        lists = [list(range(start, start + 4)) for start in range(first, first + 28, 4)]
        if on(2, 3):
            change(lists)
        return iter(DataLoader(Samples(60), lists, check_every=0 if change is shorten else CHECK_EVERY))

    return plant


def shorten(lists: list[list[int]]) -> None:
    del lists[FAULT_AT][-1]


def leave_out(lists: list[list[int]]) -> None:
    del lists[-1]


FAULTS: dict[str, Plant] = {
    "a list that is shorter": listed(shorten),
    "a list less": listed(leave_out),
    "another seed on a data-parallel rank": lambda: batches_of(seed=SEED + 2 * on(2, 3)),
    "another seed on a tensor peer": lambda: batches_of(seed=SEED + on(3)),
    "no shuffling on one rank": lambda: batches_of(shuffle=not on(2)),
    "a sample less on one node's disk": lambda: batches_of(Samples(50 - on(2, 3))),
    "a skipped batch": skipping,
    "a repeated batch": repeating,
    "swapped fields": changing(swap_fields, 3),
    "stale memory": changing(stale_memory, 1),
    "a lost row": changing(lost_row, 2),
    "rows in another order": changing(swap_rows, 3),
    "a batch changed in place": changing(in_place, 1),
    "another dtype, later": changing(another_dtype, 2, 3),
    "a transform that draws from the rank's state": rank_state,
    "one altered sample on a tensor peer": changing(flip_a_bit, 1),
    "a sample that only a tensor peer cannot read": failing_once,
    "a neighbour's sample": lambda: batches_of(Samples(alter=next_number if on(3) else None)),
    "other data on a data-parallel rank": lambda: batches_of(Samples(alter=next_number if on(2, 3) else None)),
    "two loaders in another order": swapped_loaders,
    "another epoch": lambda: batches_of(consumed=56 * on(2, 3)),
    "overlapping shards": lambda: batches_of(shard=0),
    "another shard than the tensor peer": lambda: batches_of(shard=0 if on(3) else -1),
    "another global batch size": lambda: batches_of(micro_batch=3 + on(0, 1)),
}


def named(plant: Plant) -> tuple[int, str]:
    """At which step which error came; -1 if none did."""
    batches = plant()
    for step in range(STEPS):
        try:
            to_global(next(batches))
        except DataPipelineError as error:
            return step, f"{type(error).__name__}: {error}"
    return -1, ""


def main() -> None:
    found: dict[str, Any] = {}
    set_mesh(ParallelMesh(2, 2, 1, rank=RANK))
    links = watch_over_ranks()._links
    # As if each rank were on a node of its own; `own_loop.py` skips batches on one node.
    notes, links.notes = links.notes, None
    try:
        for name, plant in FAULTS.items():
            found[name] = named(plant)
            flow.comm.barrier()
    finally:
        links.notes = notes
    Path(sys.argv[1], f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
