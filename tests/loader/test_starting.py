"""Starting worker processes: datasets travel by value, by memory map, by shared memory, or with a fork."""

from __future__ import annotations

import copy
import importlib
import logging
import mmap
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import types
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import cloudpickle
import numpy as np
import pytest

from libai_data import DataLoader, from_iterable
from libai_data.data.datasets.combine import Subset
from libai_data.errors import ConfigError, DataPipelineError, SampleError, StorageError
from libai_data.launch import parent_pipe
from libai_data.loader import same_dataset
from libai_data.loader.executor import Payload
from libai_data.loader.failures import ErrorPolicy
from libai_data.loader.shipping import ship, unship
from libai_data.loader.starting import WorkerStarter
from tests.deadline import Deadline, run_to_end, stretched, wait_until
from tests.loader.odd_datasets import ByDescriptor, ByPipe, four_numbers
from tests.loader.sample_datasets import (
    Arrays,
    DeadlyToUnpack,
    Describing,
    FlowTensors,
    Numbers,
    OnlyHere,
    OpenFile,
    Scaled,
    WithFunction,
    flow_collator,
)
from tests.loader.streams import WORKER_NAMES, WORKERS, content, descriptors, loading, stream, worker_pids
from tests.properties import slowly

PROCESSES = pytest.mark.parametrize("start_method", ["spawn", "fork"])


def values(dataset: Any, name: str, **arguments: Any) -> list[Any]:
    return [
        value
        for _, fields in stream(dataset, batches=4, **{"num_workers": 2, **arguments})
        for value in np.frombuffer(fields[name][2], fields[name][0].rpartition(".")[2]).tolist()
    ]


@PROCESSES
def test_workers_are_processes_of_their_own_without_oneflow_or_job(start_method: str, monkeypatch: Any) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "4", "RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    with loading(Describing(), num_workers=2, start_method=start_method) as loader:
        batch = next(iter(loader))
        assert set(batch.pid.tensor.numpy().tolist()) <= set(worker_pids(loader))
        if start_method == "spawn":
            assert not batch.has_oneflow.tensor.numpy().any()


def test_samples_of_oneflow_tensors_are_read_by_spawned_workers_that_join_no_job(monkeypatch: Any) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "4", "RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    for collate_fn in (None, flow_collator):
        with loading(FlowTensors(8), num_workers=1, start_method="spawn", collate_fn=collate_fn) as loader:
            batch = next(iter(loader))
        assert batch.data.tensor.numpy().tolist() == [[index, index + 1] for index in range(4)]
        assert batch.job_variables.tensor.numpy().tolist() == [0] * 4
        assert batch.world_size.tensor.numpy().tolist() == [1] * 4


@pytest.mark.parametrize("seed", [None, slowly("random"), "7"])
def test_workers_share_one_hash_seed_and_the_trainers_where_it_has_one(seed: str | None, monkeypatch: Any) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    program = "import sys; sys.stdout.write(','.join(str(hash(f'sample {i}')) for i in range(16)))"
    of_seed = {**os.environ, "PYTHONHASHSEED": seed if seed == "7" else "0"}
    expected = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=of_seed).stdout
    dataset = WithFunction(lambda index: hash(f"sample {index}"))
    assert values(dataset, "value", start_method="spawn") == [int(text) for text in expected.split(",")]


@pytest.mark.parametrize(
    ("seed", "kept", "is_told"),
    [
        (None, "{'a', 'b'}", True),
        (None, "{1, 2}", False),
        slowly("7", "{'a', 'b'}", False),
        slowly("0", '{b"a", 1}', False),
    ],
)
def test_sets_of_texts_are_named_if_workers_have_another_hash_seed(seed: str | None, kept: str, is_told: bool) -> None:
    program = (
        "from libai_data import DataLoader\n"
        "from tests.loader.sample_datasets import Numbers\n"
        "dataset = Numbers(4)\n"
        f"dataset.names = {{'inner': frozenset({kept})}}\n"
        "for start_method in ('fork', 'spawn'):\n"
        "    loader = DataLoader(dataset, num_workers=1, start_method=start_method)\n"
        "    print(len(list(loader.numpy())))\n"
        "    loader.close()\n"
    )
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    variables.update({} if seed is None else {"PYTHONHASHSEED": seed})
    run = run_to_end([sys.executable, "-c", program], 100, env=variables, check=True)
    told = (
        "Numbers may use hashes of texts (dataset.names['inner']). Python chose the hash seed of this process at random"
    )
    assert run.stderr.count(told) == is_told


HASHING = """
import logging
from functools import partial
import numpy as np
from libai_data import DataLoader
from libai_data.data.datasets import Map

def hashed(scale, sample):
    return {"x": hash("text") // scale}

def collate(samples):
    return {"x": np.full(len(samples), hash("text") % 100)}

def number_of(text):
    return hash(text) % 100_000

class Base:
    def __len__(self):
        return 4

class Calls(Base):
    def __getitem__(self, index):
        return {"x": number_of(f"sample {index}")}

class Orders(Base):
    def __getitem__(self, index):
        return {"x": [int(text) for text in {str(each) for each in range(9)}]}

class Keeps(Base):
    names = property(lambda self: self.kept)
    def __init__(self):
        self.kept = {"1", "2", "3", "4", "5"}
    def __getitem__(self, index):
        return {"x": [int(text) for text in self.names]}

class Plain(Base):
    def __init__(self):
        self.hash = hash("text")
    def __getitem__(self, index):
        return {"x": index in {1, 2}}

if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    cases = {name: (globals()[name](), None) for name in ("Calls", "Orders", "Keeps", "Plain")}
    cases.update(mapped=(Map(Plain(), partial(hashed, 2)), None), collated=(Map(Plain(), dict), collate))
    for name, (dataset, collate_fn) in cases.items():
        loaders = (DataLoader(dataset, num_workers=workers, collate_fn=collate_fn) for workers in (0, 1))
        first, second = ([batch["x"].numpy().tolist() for batch in loader] for loader in loaders)
        print(name, first == second)
"""


def test_workers_share_the_hash_seed_that_python_chose_if_a_dataset_uses_hashes(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(HASHING)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    run = run_to_end([sys.executable, str(tmp_path / "program.py")], 100, env=variables, check=True)
    names = ["Calls", "Orders", "Keeps", "Plain", "mapped", "collated"]
    assert run.stdout.splitlines() == [f"{name} True" for name in names]
    found = ["Calls.__getitem__()", "Orders.__getitem__()", "dataset.kept", "hashed()", "collate()"]
    assert [each for each in found if f"may use hashes of texts ({each})" not in run.stderr] == []
    assert "Workers are forked instead" in run.stderr and "Plain may use" not in run.stderr


@pytest.mark.parametrize(
    "make", [lambda: DataLoader([1, 2], num_workers=1), lambda: from_iterable(lambda: [1], 1, num_workers=1)]
)
def test_processes_without_proc_are_refused_with_the_remedy(make: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(parent_pipe, "_DESCRIPTORS", "/nowhere/fd")
    with pytest.raises(
        (ConfigError, SampleError), match=r"this system has no /nowhere/fd; mount /proc .*, or read without processes"
    ):
        next(iter(make()))


BEING_IMPORTED = """
import os
if "IMPORTED" in os.environ:
    raise ImportError("a worker imports the module again, and would start workers")
os.environ["IMPORTED"] = "1"
from libai_data import DataLoader, from_iterable
class Rows:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return {"x": index}
def shards(shard, num_shards):
    return map(Rows().__getitem__, range(shard, 4, num_shards))
read = []
for loader in (
    DataLoader(Rows(), 4, num_workers=1, multiprocessing_context="spawn"),
    from_iterable(shards, 4, num_shards=2, num_workers=2),
):
    read += [batch["x"].tolist() for batch in loader.numpy()]
    loader.close()
"""


def test_workers_do_not_import_a_module_that_starts_them_while_it_is_imported(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "being_imported.py").write_text(BEING_IMPORTED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("IMPORTED", "")
    monkeypatch.delenv("IMPORTED")
    made = importlib.import_module("being_imported")
    assert made.read == [[0, 1, 2, 3]] * 2
    assert "being_imported" not in cloudpickle.list_registry_pickle_by_value()


@pytest.mark.parametrize("change", ["path", slowly("argv"), "executable"])
def test_processes_start_whatever_sys_says_of_the_program(change: str, monkeypatch: Any) -> None:
    if change == "path":
        monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere"), b"/no\xffwhere", None])
    elif change == "argv":
        monkeypatch.delattr(sys, "argv")
    else:
        monkeypatch.setattr(sys, "executable", "")
    # Only forks start without a program.
    assert values(Numbers(16), "index", start_method="auto") == list(range(16))
    shards = from_iterable(four_numbers, 2, num_shards=2, num_workers=1, ends="short")
    try:
        if change != "executable":
            assert values(Numbers(16), "index", start_method="spawn", num_workers=1) == list(range(16))
            assert sum(len(batch["number"]) for batch in shards.numpy()) == 8
            return
        with pytest.raises(ConfigError, match=r"sys\.executable is '', so this program cannot start other processes"):
            values(Numbers(16), "index", start_method="spawn")
        with pytest.raises(SampleError, match=r"sys\.executable is '', so"):
            next(iter(shards))
    finally:
        shards.close()


@PROCESSES
@pytest.mark.parametrize("scale", [3])
def test_lambdas_travel_with_their_dataset(start_method: str, scale: int) -> None:
    found = values(WithFunction(lambda index: index * scale), "value", start_method=start_method)
    assert found == [index * 3 for index in range(16)]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script that finds this package wherever it lies."""
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return run_to_end([sys.executable, *arguments], 200, env=path)


AT_EXIT = """
import atexit, sys

late = []
atexit.register(lambda: late[0]())  # runs after the exit handlers of modules that are imported later

from libai_data import DataLoader, from_iterable

def numbers(shard, num_shards):
    return ({"x": number} for number in range(shard, 24, num_shards))

if sys.argv[1] == "shards":
    loader = from_iterable(numbers, 4, num_shards=3, num_workers=1, ends="short")
else:
    loader = DataLoader([{"x": number} for number in range(24)], 4, num_workers=1, worker_type=sys.argv[1])
batches = iter(loader.numpy())
next(batches)
late.append(lambda: list(batches if sys.argv[2] == "continued" else loader.numpy()))
"""


@pytest.mark.parametrize("pass_", ["continued", slowly("begun")])
@pytest.mark.parametrize("kind", ["process", slowly("thread"), "shards"])
def test_a_pass_in_an_exit_handler_after_the_workers_ended_says_so(kind: str, pass_: str) -> None:
    result = run("-c", AT_EXIT, kind, pass_)
    assert re.search(r"the loader (has been|was) closed|any more when the program ends", result.stderr), result.stderr


MAIN_SCRIPT = """
import sys
from typing import NamedTuple

import numpy as np
from libai_data.loader import BatchLoader
from libai_data.data.samplers import SingleRoundSampler

SCALE = 7

class Mine:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return {"x": scaled(index)}

def scaled(index):
    return np.array(index * SCALE)

def collate(samples):
    return {"x": np.stack([sample["x"] for sample in samples])}

class Pair(NamedTuple):
    x: object
    y: object

class Nested(Mine):
    def __getitem__(self, index):
        return {"x": scaled(index), "pair": Pair(index, f"{sys.argv[1:]} {__debug__}")}

class Named(Mine):
    def __getitem__(self, index):
        return {"x": scaled(index), "pair": Pair(index, np.zeros(index % 1))}

if __name__ == "__main__":
    for collate_fn in (None, collate):
        for start_method in ("spawn", "fork", "auto"):
            dataset = Mine()
            sampler = SingleRoundSampler(dataset, 4)
            loader = BatchLoader(
                dataset, sampler, num_workers=2, start_method=start_method, collate_fn=collate_fn
            )
            found = [x for batch in loader for x in batch.x.tensor.numpy().tolist()]
            if found != [7 * index for index in range(8)]:
                raise ValueError((start_method, found))
            loader.close()
    for dataset in (Nested(), Named()):
        loader = BatchLoader(dataset, SingleRoundSampler(dataset, 4), num_workers=1, start_method="spawn")
        pair = next(iter(loader)).pair
        found = type(pair) is Pair and (type(dataset) is Named or pair.y[0] == "['--of-the-trainer'] False")
        if not found:
            raise ValueError(pair)
        loader.close()
    print("all as it should be")
"""


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [slowly(True), False], ids=["with the main guard", "without the main guard"])
def test_classes_and_functions_of_the_main_script_travel(tmp_path: Path, guarded: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(MAIN_SCRIPT if guarded else MAIN_SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    result = run("-O", str(script), "--of-the-trainer")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "all as it should be\n"


SPAWNING_SCRIPT = """
import multiprocessing

import numpy as np
from libai_data import DataLoader, from_iterable

class Mine:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return {"x": np.int64(index)}

def shards(shard, num_shards):
    return ({"x": np.int64(index)} for index in range(shard, 8, num_shards))

def read():
    for loader in (DataLoader(Mine(), 4, num_workers=1), from_iterable(shards, 4, num_shards=2, num_workers=2)):
        print([x for batch in loader for x in batch["x"].numpy().tolist()])
        loader.close()

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=read)
    process.start()
    process.join()
"""


@pytest.mark.slow
def test_the_main_script_travels_from_a_process_that_multiprocessing_has_spawned(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNING_SCRIPT)
    result = run(str(tmp_path / "train.py"))
    assert result.stdout == f"{list(range(8))}\n" * 2, result.stderr


def test_an_open_file_makes_workers_fork_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(16)))
    caplog.set_level(logging.INFO, "libai_data.loader.starting")
    assert values(OpenFile(str(path)), "byte") == list(range(16))
    [record] = [record for record in caplog.records if record.name == "libai_data.loader.starting"]
    assert "OpenFile cannot be sent to a worker process" in record.message
    assert "forked" in record.message


def test_forks_read_an_open_file_each_at_a_place_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(100)))
    file = path.open("rb", buffering=0)
    file.seek(7)
    dataset = WithFunction(lambda index: file.read(1)[0], size=64)
    assert min(values(dataset, "value", num_workers=1)) >= 7
    # Nothing that a worker read has moved the place of the trainer, which all forks would share.
    assert file.tell() == 7
    file.close()


def test_forks_have_thread_pools_and_connections_of_their_own() -> None:
    """Workers that share a connection get each other's answers; the threads of a pool do not run in them."""
    with ThreadPoolExecutor(2) as pool:
        assert pool.submit(abs, -1).result() == 1
        dataset = WithFunction(lambda index: pool.submit(abs, -index).result(20))
        assert values(dataset, "value") == list(range(16))
    with multiprocessing.Manager() as manager:
        shared = manager.list(range(100, 116))

        def socket_of_proxy() -> int:
            return os.fstat(shared._tls.connection.fileno()).st_ino  # type: ignore[attr-defined]

        assert shared[0] == 100
        dataset = WithFunction(lambda index: [shared[index], socket_of_proxy()])
        items, sockets = np.array(values(dataset, "value")).reshape(-1, 2).T
        assert items.tolist() == list(range(100, 116))
        assert socket_of_proxy() not in sockets
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), timeout=stretched(20))
        accepted, _ = server.accept()
        with client, accepted:
            dataset = WithFunction(lambda index: len(client.recv(1)))
            socket.setdefaulttimeout(20)
            try:
                assert values(dataset, "value") == [0] * 16, "the end of the connection"
            finally:
                socket.setdefaulttimeout(None)
            assert os.get_blocking(accepted.fileno())
            accepted.send(b"x")
            assert client.recv(1) == b"x"


def test_an_open_file_is_refused_by_spawn_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(16)))
    before = descriptors()
    dataset = OpenFile(str(path))
    with pytest.raises(ConfigError, match=r"OpenFile cannot be sent.*first __getitem__.*start_method='fork'"):
        stream(dataset, batches=1, num_workers=2, start_method="spawn")
    dataset.file.close()
    wait_until(lambda: descriptors() <= before, "end of what was opened")


@pytest.mark.parametrize("workers", WORKERS, ids=WORKER_NAMES)
def test_the_number_of_a_descriptor_is_refused_by_spawned_workers_and_valid_in_all_others(
    workers: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"right")
    dataset = ByDescriptor(os.open(tmp_path / "file", os.O_RDONLY))
    try:
        if workers.get("start_method") == "spawn":
            with pytest.raises(SampleError, match="Bad file descriptor"):
                stream(dataset, batches=4, **workers)
        else:
            assert stream(dataset, batches=4, **workers) == stream(Numbers(), batches=4)
    finally:
        os.close(dataset.descriptor)


@pytest.mark.parametrize("kind", ["pipe", "socket", "memory", "lowest number"])
def test_a_spawned_worker_reads_no_other_file_by_the_number_of_a_pipe_or_connection(kind: str) -> None:
    if kind in ("pipe", "lowest number"):
        descriptor, other = os.pipe()
    elif kind == "socket":
        descriptor, other = (end.detach() for end in socket.socketpair())
    else:
        descriptor, other = os.memfd_create("data"), os.memfd_create("other")
    try:
        # Number 3 is open in any case; the first file that a worker opens for itself would have it.
        dataset = ByPipe(3 if kind == "lowest number" else descriptor)
        with pytest.raises(SampleError, match="Bad file descriptor"):
            stream(dataset, batches=4, num_workers=1, start_method="spawn", timeout=stretched(20))
    finally:
        os.close(descriptor)
        os.close(other)


def test_an_unknown_start_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="start_method is 'forkserver'"):
        stream(Numbers(), batches=1, num_workers=1, start_method="forkserver")


def test_a_memory_map_is_opened_again_instead_of_copied(tmp_path: Path) -> None:
    path = tmp_path / "rows.bin"
    rows = np.arange(4000, dtype=np.uint16).reshape(500, 8)
    rows.tofile(path)
    whole = np.memmap(path, np.uint16, "r", shape=(500, 8))
    for view in (whole, whole[100:200], np.asarray(whole)[3:9]):
        rows = copied(Arrays(view)).rows
        # Who made a plain array of a map gets a plain one back, over a map: its views cost a tenth.
        assert over_a_map(rows)
        assert type(rows) is type(view)
        assert rows.tolist() == view.tolist()


def over_a_map(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


RECORD = np.dtype([("image", np.uint8, (2, 2)), ("label", np.int32), ("name", "S5")], align=True)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_maps_of_records_and_strided_maps_arrive_as_they_are_without_a_copy(tmp_path: Path, mode: Any) -> None:
    path = tmp_path / "records.bin"
    records = np.zeros(30, RECORD)
    records["label"], records["name"] = np.arange(30), b"a name"
    path.write_bytes(b"head" + records.tobytes())
    mapped = np.memmap(path, RECORD, mode, offset=4)
    fortran = np.memmap(path, np.int16, mode, shape=(20, 10), order="F")
    for view in (mapped, mapped[3:20:2], mapped["label"], mapped["image"][:, 1], mapped.view(np.recarray)):
        rows = copied(Arrays(view)).rows
        assert over_a_map(rows)
        assert type(rows) is type(view)
        assert rows.dtype == view.dtype
        assert rows.dtype.fields == view.dtype.fields
        assert rows.tobytes() == view.tobytes()
    assert copied(mapped.view(np.recarray)).label.tolist() == list(range(30))
    for view in (fortran, fortran.T, fortran[::-1, 3:7], np.broadcast_to(fortran[0], (4, 10))):
        rows = copied(Arrays(view)).rows
        assert over_a_map(rows)
        assert rows.strides == view.strides
        assert rows.tolist() == view.tolist()
    assert copied(mapped).filename == mapped.filename


@pytest.mark.parametrize("fate", [slowly("replaced"), slowly("unlinked"), "replaced twice", slowly("renamed")])
def test_workers_map_the_file_that_the_trainer_maps_whatever_became_of_its_name(tmp_path: Path, fate: str) -> None:
    path = tmp_path / "rows bin"
    np.zeros((64, 3), np.int64).tofile(path)
    maps = [np.memmap(path, np.int64, "r", shape=(64, 3))]
    for version in range(1 + (fate == "replaced twice")):
        if fate == "unlinked":
            path.unlink()
        elif fate == "renamed":
            path.rename(tmp_path / "other")
            np.ones((64, 3), np.int64).tofile(path)
        else:
            np.full((64, 3), version + 1, np.int64).tofile(tmp_path / "new")
            (tmp_path / "new").replace(path)
            maps.append(np.memmap(path, np.int64, "r", shape=(64, 3)))
    for rows in maps:
        found = values(Arrays(rows), "row", start_method="spawn")
        assert found == rows[:16].ravel().tolist()


def test_a_replacement_worker_reads_the_version_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.bin"
    np.zeros((640, 3), np.int64).tofile(path)
    rows = np.memmap(path, np.int64, "r", shape=(640, 3))
    with loading(Arrays(rows), num_workers=2, start_method="spawn", prefetch=1) as loader:
        iterator = iter(loader)
        next(iterator)
        np.ones((640, 3), np.int64).tofile(tmp_path / "new")
        (tmp_path / "new").replace(path)
        for pid in worker_pids(loader):
            os.kill(pid, signal.SIGKILL)
        assert not any(next(iterator).row.tensor.numpy().any() for _ in range(8))


def test_a_map_that_the_trainer_has_closed_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.bin"
    np.zeros((64, 3), np.int64).tofile(path)
    shipment = ship(np.memmap(path, np.int64, "r", shape=(64, 3)))
    os.truncate(path, 8)
    with pytest.raises(StorageError, match=r"cannot map .*rows.bin.*start_method='fork'"):
        unship(shipment.descriptor)
    shipment.close()


@pytest.mark.parametrize("mode", ["r", "c", "r+", "w+"])
def test_memory_maps_of_every_mode_arrive_as_they_are_read_here(tmp_path: Path, mode: Any) -> None:
    path = tmp_path / "rows.bin"
    np.arange(40, dtype=np.int64).tofile(path)
    rows = np.memmap(path, np.int64, mode, shape=(10, 4))
    if mode != "r":
        rows[2] = 77
    for view in (rows, rows[2:7], rows[:, 1:3], rows[::2], rows.T, rows[3:3]):
        assert copied(Arrays(view)).rows.tolist() == view.tolist()


def copied(payload: Any) -> Any:
    """An object as a worker gets it."""
    shipment = ship(payload)
    try:
        return unship(shipment.descriptor)
    finally:
        shipment.close()


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "float32", "int64", "complex128", "datetime64[s]", "U3"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (100, 70)])
def test_arrays_arrive_as_they_were(dtype: str, shape: Any) -> None:
    array = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(dtype)
    for view in (array, array[..., ::-1] if array.ndim else array, np.asfortranarray(array)):
        copy = copied({"a": view, "b": [view]})
        assert copy["a"].dtype == view.dtype
        assert copy["a"].shape == view.shape
        assert (copy["a"] == view).all()


class Noted(np.ndarray):
    note = ""


def arrays_of_other_forms() -> dict[str, Any]:
    records = np.zeros(5000, RECORD)
    records["label"] = np.arange(5000)
    rows = np.arange(20_000).reshape(200, 100)
    noted = rows.view(Noted)
    noted.note = "a note"
    constant = rows[:, :-1]
    constant.flags.writeable = False
    return {
        "records": records.view(np.recarray),
        "field": records["label"],
        "masked": np.ma.MaskedArray(rows, rows % 2 == 0, fill_value=7, hard_mask=True),
        "columns": rows[:, :-1],
        "backwards": rows[::-1, 1:],
        "constant": constant,
        "sparse": rows[::50],
        "windows": np.lib.stride_tricks.sliding_window_view(np.arange(10_000), 1000),
        "repeated": np.broadcast_to(rows[0], (10**9, 100)),
        "noted": noted,
    }


@pytest.mark.parametrize("form", list(arrays_of_other_forms()))
def test_arrays_of_any_class_and_any_strides_are_shared_bytes(form: str) -> None:
    array = arrays_of_other_forms()[form]
    shipment = ship(array)
    size = os.fstat(shipment.descriptor).st_size
    copy = unship(shipment.descriptor)
    shipment.close()
    # What is pickled, each process would have for itself.
    assert shipment.pickled_bytes < 1000
    assert size < 400_000
    assert (type(copy), copy.dtype, copy.shape) == (type(array), array.dtype, array.shape)
    assert copy.flags.writeable == array.flags.writeable
    assert copy[:1000].tobytes() == array[:1000].tobytes()
    assert getattr(copy, "note", "") == getattr(array, "note", "")
    assert getattr(copy, "hardmask", None) == getattr(array, "hardmask", None)


def test_many_small_arrays_need_little_memory() -> None:
    shipment = ship([np.arange(10) for _ in range(1000)])
    assert os.fstat(shipment.descriptor).st_size < 300_000
    shipment.close()


def test_arrays_are_not_copied_where_workers_are_forked(monkeypatch: Any) -> None:
    many = [*map(str, range(10**6))], np.zeros(10)
    monkeypatch.setattr(os, "memfd_create", lambda *_: pytest.fail("it was copied"))
    starter = WorkerStarter(Payload(many, None, 0, ErrorPolicy("raise", None)), "auto")
    assert starter._shipment is None


@pytest.mark.parametrize(
    "of",
    [
        b"abc",
        array("d", [1.5, 2.5]),
        array("q", [1, 2]),
        np.arange(6.0).reshape(2, 3),
        np.arange(12, dtype=np.int32)[::2],
        np.zeros(0),
    ],
    ids=["bytes", "d", "q", "2 dims", "strided", "empty"],
)
def test_a_memoryview_arrives_with_its_items(of: Any) -> None:
    view = memoryview(of)
    copy = copied({"a": view})["a"]
    assert (copy.format, copy.shape, copy.readonly) == (view.format, view.shape, view.readonly)
    assert copy.tolist() == view.tolist()


def test_an_array_of_which_two_places_know_arrives_once() -> None:
    array = np.zeros(10_000)
    copy = copied([array, {"again": array}])
    copy[0][5] = 1
    assert copy[1]["again"][5] == 1


def test_what_a_worker_writes_to_its_dataset_stays_its_own() -> None:
    array = np.zeros(10_000)
    shipment = ship(array)
    first, second = unship(shipment.descriptor), unship(shipment.descriptor)
    shipment.close()
    first[...] = 1
    assert not second.any()


@pytest.mark.parametrize("start_method", ["spawn", slowly("fork")])
def test_a_large_dataset_is_shared_not_copied(start_method: str) -> None:
    """128 MB of which each worker reads every byte cost it next to nothing of its own."""
    ballast = np.ones(128 * 2**20 // 8, dtype=np.int64)
    arguments = {"num_workers": 2, "start_method": start_method}
    alone = max(values(Describing(), "private_kb", **arguments))
    loaded = max(values(Describing(ballast=ballast), "private_kb", **arguments))
    assert loaded < alone + 20_000
    if start_method == "spawn":
        assert loaded < 60_000


def test_a_dataset_that_cannot_be_unpacked_in_a_worker_says_why() -> None:
    with pytest.raises(DataPipelineError, match=r"(?s)only here.*Traceback of worker"):
        stream(OnlyHere(), batches=1, num_workers=2, start_method="spawn")


def test_workers_that_die_as_they_start_are_started_a_few_times_only(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SampleError, match=r"exit code 9|died 3 times"):
        stream(DeadlyToUnpack(), batches=1, num_workers=1, start_method="spawn", prefetch=8)
    assert sum("is replaced" in record.message for record in caplog.records) <= 4


def dynamic_dataset() -> Any:
    """Of a class that pickle knows by its module, which no other process has."""
    module = types.ModuleType("only_in_this_process")
    exec("from tests.loader.sample_datasets import Numbers\nclass Dynamic(Numbers): pass", module.__dict__)
    sys.modules[module.__name__] = module
    return module.Dynamic()


@pytest.mark.parametrize("make", [dynamic_dataset, lambda: OnlyHere(), lambda: DeadlyToUnpack()])
@pytest.mark.parametrize("workers", [1, slowly(3)])
def test_what_a_worker_cannot_unpickle_makes_workers_fork(
    make: Any, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert stream(make(), batches=4, num_workers=workers) == stream(Numbers(), batches=4)
    [record] = [record for record in caplog.records if record.name.startswith("libai_data.loader")]
    assert "unpickle" in record.message
    assert "Workers are forked instead" in record.message


def test_a_dataset_of_many_python_objects_is_forked_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "libai_data.loader.starting")
    many = Describing(ballast=None)
    many.objects = [{"text": f"sample {index}", "label": index} for index in range(200_000)]  # type: ignore[attr-defined]
    arguments = {"num_workers": 2, "start_method": "auto"}
    before = descriptors()
    assert max(values(many, "private_kb", **arguments)) < max(values(Describing(), "private_kb", **arguments)) + 20_000
    [record] = [record for record in caplog.records if record.name == "libai_data.loader.starting"]
    assert "has Python objects of about" in record.message
    wait_until(lambda: descriptors() <= before, "end of what was opened")


@pytest.mark.parametrize("workers", [*WORKERS[:3], slowly(WORKERS[3])], ids=WORKER_NAMES)
def test_a_loader_that_a_thread_began_goes_on_in_another(workers: dict[str, Any]) -> None:
    dataset = Numbers()
    with loading(dataset, **workers) as loader:
        found: list[Any] = []
        iterators: list[Any] = []

        def begin() -> None:
            iterators.append(iter(loader))
            found.append(content(next(iterators[0])))

        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
        found.extend(content(next(iterators[0])) for _ in range(9))
    assert found == stream(dataset, batches=10)


@pytest.mark.parametrize("workers", [*WORKERS[:3], slowly(WORKERS[3])], ids=WORKER_NAMES)
@pytest.mark.parametrize("wrap", [lambda scaled: scaled, lambda scaled: Subset(scaled, range(8))], ids=["bare", "part"])
def test_a_dataset_that_changes_between_passes_gives_what_it_gives_then(workers: dict[str, Any], wrap: Any) -> None:
    scaled = Scaled()
    loader = DataLoader(wrap(scaled), 8, **workers)

    def total() -> int:
        return sum(int(batch["x"].sum()) for batch in loader.numpy())

    assert total() == 28
    reader = loader._reader
    assert total() == 28
    assert loader._reader is reader
    scaled.factor = 10
    assert total() == 280
    scaled.table = [1]
    assert total() == 360
    scaled.table[0] = 2
    assert total() == 440
    reader = loader._reader
    assert total() == 440
    assert loader._reader is reader
    loader.close()


class Slotted:
    __slots__ = ("rows",)

    def __init__(self, rows: Any) -> None:
        self.rows = rows


class Shifted(Subset):
    """Of a class of this package."""

    by = 0

    def __getitem__(self, index: int) -> Any:
        return {"x": super().__getitem__(index)["x"] + self.by}


class Held(Scaled):
    def __init__(self, holds: Any, row: Any) -> None:
        super().__init__()
        self.holds, self.row = holds, row

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": index + int(self.row(self.holds))}


def change_item(held: Held, key: Any, holds: Any = None) -> None:
    (held.holds if holds is None else holds)[key] += 1


CHANGES: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "array": (np.zeros(9, np.int64), lambda held: change_item(held, 0), lambda holds: holds[0]),
    "dict": ({"a": {"b": 0}}, lambda held: change_item(held, "b", held.holds["a"]), lambda holds: holds["a"]["b"]),
    "list": ([[0], [0]], lambda held: change_item(held, 0, held.holds[1]), lambda holds: holds[1][0]),
    "set": ({1}, lambda held: held.holds.add(2), lambda holds: len(holds) - 1),
    "config": (SimpleNamespace(a=0), lambda held: setattr(held.holds, "a", 1), lambda holds: holds.a),
    "slots": (Slotted(0), lambda held: setattr(held.holds, "rows", 1), lambda holds: holds.rows),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_a_dataset_holds_may_change_in_place_between_passes(kind: str) -> None:
    holds, change, row = CHANGES[kind]
    held = Held(copy.deepcopy(holds), row)
    loader = DataLoader(held, 8, num_workers=1, start_method="fork")
    assert [batch["x"].sum() for batch in loader.numpy()] == [28]
    change(held)
    assert [batch["x"].sum() for batch in loader.numpy()] == [36]
    loader.close()


def test_attributes_of_a_class_that_derives_from_one_of_this_package_may_change_between_passes() -> None:
    shifted = Shifted(Scaled(), range(8))
    loader = DataLoader(shifted, 8, num_workers=1, start_method="fork")
    assert [batch["x"].sum() for batch in loader.numpy()] == [28]
    shifted.by = 1
    assert [batch["x"].sum() for batch in loader.numpy()] == [36]
    loader.close()


class Curriculum:
    """Its samples have the present level."""

    level = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"level": self.level}


@pytest.mark.parametrize("workers, worker_type, warnings", [(1, "process", 1), (1, "thread", 0), (0, "process", 0)])
def test_a_number_that_changes_while_workers_read_is_warned_of(
    workers: int, worker_type: str, warnings: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_dataset, "_SHARE_OF_LOOKS", 1.0)  # The garbage collector may run during a look.
    dataset = Curriculum()
    loader = DataLoader(dataset, 8, num_workers=workers, worker_type=worker_type, ends="cycle")
    batches = iter(loader.numpy())
    next(batches)
    dataset.level = 5
    levels = {int(next(batches)["level"][0]) for _ in range(100)}
    deadline = Deadline(20)
    while warnings and not caplog.records and not deadline.has_passed:
        next(batches)
    assert caplog.text.count("'level' of Curriculum has changed while worker processes read.") == warnings
    assert (levels == {0}) if warnings else (5 in levels)
    loader.close()


class Stage:
    level = 0


def test_a_change_is_warned_of_soon_also_after_a_look_that_had_to_wait_for_a_core(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset, look, clock = Stage(), same_dataset.attributes_of, SimpleNamespace(now=100.0)
    clock.monotonic, clock.thread_time = lambda: clock.now, lambda: 0.0

    def wait_and_look(*things: Any) -> Any:
        clock.now += 5.0
        return look(*things)

    monkeypatch.setattr(same_dataset, "time", clock)
    monkeypatch.setattr(same_dataset, "attributes_of", wait_and_look)
    copy = same_dataset.WorkersCopy(dataset)
    assert copy.is_current()
    dataset.level = 5
    copy.warn_if_changed(0)
    assert "'level' of Stage has changed while worker processes read." in caplog.text
