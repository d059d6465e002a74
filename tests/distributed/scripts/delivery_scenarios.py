"""Lives through many scenarios in every read mode, on some meshes: `delivery_scenarios.py FOLDER 2x2x1 4x1x1 ...`.

With "2x2x1, all", each scenario is also lived through with workers of several kinds, which else only some are.
Each rank writes `FOLDER/<rank>.json`: mesh -> scenario -> read mode -> what it saw. A batch is told by the digests of
its rows, so that the rows of the ranks, put together, can be compared between meshes.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import socket
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Callable

import numpy as np
import oneflow as flow

from libai_data.config import LazyCall
from libai_data.delivery import to_global
from libai_data.delivery.build import build_nlp_test_loader, build_nlp_train_loader
from libai_data.delivery.network import NetworkFeed
from libai_data.errors import PassError
from libai_data.loader import PadCollator
from libai_data.mesh.current import get_mesh, set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.structures import DistTensorData, Instance, batch_info, origin_of

FOLDER = Path(sys.argv[1])
RANK = flow.env.get_rank()
NODES = flow.env.get_node_size()
GLOBAL_BATCH = 8
LARGE = (64, 320)
SEED = 3
MODES = ("every_rank", "node", "rank0")
DTYPES = ("bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64")
THOROUGH = ("1x1x1", "2x1x1", "2x2x1")
BRIEF = ("stream", "rounds", "broken_off", "counted")

Options = dict[str, Any]


class Samples:
    """Samples made of their index; counts who opened it and what was read, in files."""

    def __init__(self, size: int, kind: str = "plain", log: str = "", needs: str = "") -> None:
        if needs and not Path(needs).exists():
            raise FileNotFoundError(f"{needs} is not on this node")
        self.size, self.kind, self.log = size, kind, log
        self._note("opened")

    def _note(self, what: str) -> None:
        if self.log:
            # One write for each line, so that processes do not mingle theirs.
            descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(descriptor, f"{what}\n".encode())
            os.close(descriptor)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Instance:
        self._note(str(index))
        rng = np.random.default_rng(index)
        if self.kind == "ragged":
            tokens = rng.integers(0, 99, (1 + index * 7 % 23,))
            return Instance(tokens=DistTensorData(tokens), index=DistTensorData(index))
        if self.kind == "dtypes":
            fields: dict[str, Any] = {name: (rng.random((3, 2)) * 9).astype(name).T for name in DTYPES}
            fields.update({f"{name}_number": fields[name][0, 0] for name in DTYPES})
            return Instance(**fields, none=np.zeros((0, 5), np.float32), wide=rng.random((2, 3, 70)).astype(np.float32))
        image = rng.random((4, 6) if self.kind == "plain" else LARGE).astype(np.float32)
        return Instance(image=DistTensorData(image), label=DistTensorData(index, placement_idx=-1))


def seen(batch: Any, convert: bool = True) -> dict[str, Any]:
    """A batch's place, and each row's digest by field."""
    info = batch_info(batch)
    assert info is not None
    rows: dict[str, list[str] | None] = {}
    for name, data in batch.get_fields().items():
        array = data.tensor.numpy()
        if name in origin_of(batch).absent:
            # Not sent to this node, for none of its ranks is of the stage that needs it.
            assert not set(get_mesh().layer_ranks(data.placement_idx)) & set(ranks_of_this_node())
            assert not array.any()
            rows[name] = None
            continue
        rows[name] = [f"{array.dtype} {list(row.shape)} {hashlib.md5(row.tobytes()).hexdigest()[:8]}" for row in array]
    if convert:
        for name, tensor in to_global(batch).items():
            assert tensor.shape[0] == GLOBAL_BATCH, name
    place = [info.step, info.epoch, info.position, info.size, info.valid]
    return {"shard": get_mesh().data_parallel_rank, "place": place, "rows": rows}


def ranks_of_this_node() -> list[int]:
    per_node = get_mesh().ranks_per_node
    return [rank for rank in range(get_mesh().world_size) if rank // per_node == RANK // per_node]


def micro_batch() -> int:
    return GLOBAL_BATCH // get_mesh().data_parallel_size


def train_loader(readers: str, size: int = 37, kind: str = "plain", **options: Any) -> Any:
    options = {"num_workers": 0, "check_every": 4, **options}
    dataset = LazyCall(Samples)(size=size, kind=kind)
    return build_nlp_train_loader(dataset, micro_batch(), seed=SEED, readers=readers, **options)[0]


def test_loader(readers: str, dataset: Any = None, **options: Any) -> Any:
    options = {"num_workers": 0, "check_every": 4, **options}
    dataset = dataset or LazyCall(Samples)(size=21)
    return build_nlp_test_loader(dataset, micro_batch(), seed=SEED, readers=readers, **options)


def drain(loader: Any, batches: Iterable[Any]) -> list[Any]:
    found = [seen(batch) for batch in batches]
    loader.close()
    return found


def stream(readers: str, **options: Any) -> Any:
    """Three epochs and more, whose borders lie within batches; with the state after each batch."""
    loader = train_loader(readers, **options)
    found = [{**seen(batch), "state": loader.state_dict()} for batch in islice(iter(loader), 15)]
    loader.close()
    return found


def rounds(readers: str, **options: Any) -> Any:
    """Two rounds of evaluation, each with padding at its end."""
    loader = test_loader(readers, **options)
    return drain(loader, (batch for _ in range(2) for batch in loader))


def ragged(readers: str, **options: Any) -> Any:
    """A collator that pads each batch to its own longest sample."""
    if (readers == "every_rank" and get_mesh().data_parallel_size > 1) or (readers == "node" and NODES > 1):
        return None
    collator = LazyCall(PadCollator)(fields={"tokens": {"value": -1}})
    loader = train_loader(readers, 37, "ragged", collate_fn=collator, **options)
    return drain(loader, islice(iter(loader), 12))


def dtypes(readers: str, **options: Any) -> Any:
    """Fields of all dtypes, numbers, and arrays without an element."""
    loader = train_loader(readers, 37, "dtypes", **options)
    return drain(loader, islice(iter(loader), 4))


def broken_off(readers: str, **options: Any) -> Any:
    """Passes that are broken off, restored states, and iterators that are not the newest any more."""
    loader = train_loader(readers, **options)
    found = [seen(batch) for batch in islice(iter(loader), 3)]
    state = json.loads(json.dumps(loader.state_dict()))
    old = iter(loader)
    found += [seen(next(old)), seen(next(old))]
    found += [seen(next(iter(loader)))]
    try:
        next(old)
    except PassError:
        pass
    else:
        raise AssertionError("an iterator that is not the newest gave a batch")
    loader.load_state_dict(state)
    found += [seen(batch) for batch in islice(iter(loader), 4)]
    loader.close()
    return found


def resumed(readers: str, **options: Any) -> Any:
    """The second half of the stream, from a state saved in the middle in another mode."""
    saving = train_loader(MODES[MODES.index(readers) - 1])
    for _ in islice(iter(saving), 7):
        pass
    state = json.loads(json.dumps(saving.state_dict()))
    saving.close()
    loader = train_loader(readers, **options)
    loader.load_state_dict(state)
    return drain(loader, islice(iter(loader), 8))


def two_loaders(readers: str, **options: Any) -> Any:
    """Evaluation in the middle of training, again and again."""
    train, test = train_loader(readers, **options), test_loader(readers, **options)
    batches = iter(train)
    found = []
    for _ in range(3):
        found += [seen(next(batches)), seen(next(batches))]
        found += [seen(batch) for batch in test]
    train.close()
    test.close()
    return found


def kept(readers: str, **options: Any) -> Any:
    """A user who keeps all batches, beyond the loader's end."""
    loader = train_loader(readers, **options)
    batches = list(islice(iter(loader), 12))
    loader.close()
    del loader
    gc.collect()
    return [seen(batch) for batch in batches]


def written(readers: str, **options: Any) -> Any:
    """Ranks that write into their batches, which others that get the same rows must not see."""
    loader = train_loader(readers, **options)
    found = []
    for batch in islice(iter(loader), 4):
        if RANK % 2:
            flow.comm.barrier()
        found.append(seen(batch, convert=False))
        for data in batch.get_fields().values():
            data.tensor.zero_()
        if RANK % 2 == 0:
            flow.comm.barrier()
    loader.close()
    return found


def counted(readers: str, **options: Any) -> Any:
    """A round over data that are only where they are read, noting who opened them, read what, and received how much."""
    mesh = get_mesh()
    run = f"{mesh.data_parallel_size}{mesh.tensor_parallel_size}{mesh.pipeline_parallel_size}-{readers}"
    log, data = FOLDER / f"log-{run}-{RANK}", FOLDER / f"data-{run}-{RANK}"
    reads = {"every_rank": True, "node": RANK % mesh.ranks_per_node == 0, "rank0": RANK == 0}[readers]
    if log.exists():
        log.unlink()  # of the same with other workers
    if reads:
        data.touch()
    # Ranks that compare read the first sample twice.
    options = {**options, "check_every": 0}
    loader = test_loader(readers, LazyCall(Samples)(size=24, kind="large", log=str(log), needs=str(data)), **options)
    for batch in loader:
        seen(batch)
    received = received_over_network(loader)
    loader.close()
    lines = log.read_text().split() if log.exists() else []
    read = sorted(int(line) for line in lines if line != "opened")
    return {"opened": lines.count("opened"), "read": read, "received": received}


def received_over_network(loader: Any) -> int:
    """Bytes that came to this rank from rank 0 over the network: tcpi_bytes_received of Linux's tcp_info."""
    feed = getattr(loader, "_feed", None)
    if not isinstance(feed, NetworkFeed):
        return 0
    return int.from_bytes(feed._link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)[128:136], "little")


SCENARIOS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (stream, rounds, ragged, dtypes, broken_off, resumed, two_loaders, kept, written, counted)
}
THREADS: Options = {"num_workers": 2, "worker_type": "thread"}
FORKS: Options = {"num_workers": 2, "start_method": "fork"}
PROGRAMS: Options = {"num_workers": 2, "start_method": "auto"}
WORKERS = [("stream", "threads", THREADS), ("stream", "forks", FORKS), ("counted", "forks", FORKS)]
ALL_WORKERS = [
    *((name, "threads", THREADS) for name in SCENARIOS),
    *((name, "forks", FORKS) for name in ("stream", "ragged", "broken_off", "two_loaders", "counted")),
    ("stream", "programs", PROGRAMS),
]


class Warnings(logging.Handler):
    """Takes note of what the loader warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def live_through(name: str, modes: Iterable[str], options: Options, warnings: Warnings) -> dict[str, Any]:
    found = {}
    for readers in modes:
        warnings.messages.clear()
        found[readers] = {"saw": SCENARIOS[name](readers, **options), "warned": list(warnings.messages)}
    return found


def main() -> None:
    warnings = Warnings()
    logging.getLogger("libai_data").addHandler(warnings)
    found: dict[str, Any] = {}
    for mesh in sys.argv[2:]:
        sizes, _, everything = mesh.partition(", ")
        data, tensor, pipeline = map(int, sizes.split("x"))
        set_mesh(ParallelMesh(data, tensor, pipeline, rank=RANK, num_nodes=NODES))
        here = found[mesh] = {}
        for name in SCENARIOS if sizes in THOROUGH else BRIEF:
            here[name] = live_through(name, MODES, {}, warnings)
        if sizes in THOROUGH:
            for name, kind, options in ALL_WORKERS if everything else WORKERS:
                here[f"{name}, {kind}"] = live_through(name, MODES, options, warnings)
    (FOLDER / f"{RANK}.json").write_text(json.dumps({"nodes": NODES, "found": found}))


if __name__ == "__main__":
    main()
