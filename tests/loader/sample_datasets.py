"""Datasets and collators for the loader's tests, in a module that a worker process imports quickly.

Each module-level class can be sent to a worker that is a program of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

import numpy as np

from libai_data.data.random.sample_random import sample_generator, sample_generators
from libai_data.structures import DistTensorData, Instance


class Numbers:
    """Samples that tell their index, and draw from their own generator: {"index": int64 [], "values": float32 [3]}."""

    def __init__(self, size: int = 64) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        values = sample_generator().random(3, dtype=np.float32)
        return Instance(index=DistTensorData(np.array(index)), values=DistTensorData(values, placement_idx=-1))


class OneByOne:
    """A user's wrapper of a dataset, which reads single samples only."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


class NumberDicts(Numbers):
    """The same as bare dicts, which have default layouts."""

    def __getitem__(self, index: int) -> Any:
        return {"index": np.array(index), "values": sample_generator().random(3, dtype=np.float32)}


class NumbersTogether(Numbers):
    """The same through `__getitems__`."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [
            Instance(
                index=DistTensorData(np.array(index)),
                values=DistTensorData(generator.random(3, dtype=np.float32), placement_idx=-1),
            )
            for index, generator in zip(indices, sample_generators())
        ]


class NumbersFilled(Numbers):
    """The same through `read_batch`."""

    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        out["index"][...] = indices
        for row, generator in enumerate(sample_generators()):
            out["values"][row] = generator.random(3, dtype=np.float32)


class Slow(Numbers):
    """Takes its time over each sample, so that signals hit in the middle of one."""

    def __init__(self, size: int = 64, seconds: float = 0.001) -> None:
        super().__init__(size)
        self.seconds = seconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return super().__getitem__(index)


class Fields:
    """Every sample has the fields given."""

    def __init__(self, fields: dict[str, Any], size: int = 8) -> None:
        self.size = size
        self.fields = fields

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return dict(self.fields)


class OfAnyForm:
    """Samples that a function makes of their index."""

    def __init__(self, sample: Callable[[int], Any], length: int = 8) -> None:
        self.sample, self.length = sample, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


class Ragged(Numbers):
    """Sequences of different lengths: {"tokens": int64 [index % 7 + 1], "index": int64 []}."""

    def __getitem__(self, index: int) -> Any:
        return {"tokens": np.arange(index, index + index % 7 + 1), "index": index}


class Failing(Numbers):
    """Raises for the indices that are bad."""

    def __init__(self, size: int = 64, bad: Sequence[int] = ()) -> None:
        super().__init__(size)
        self.bad = frozenset(bad)

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            self.fail(index)
        return super().__getitem__(index)

    def fail(self, index: int) -> None:
        raise KeyError(f"no picture {index}")


class FailingFilled(Failing, NumbersFilled):
    """The same through `read_batch`, which fails as a whole."""

    def read_batch(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        for index in indices.tolist():
            if index in self.bad:
                self.fail(index)
        super().read_batch(indices, out)


class Exiting(Failing):
    """Ends its process."""

    def fail(self, index: int) -> None:
        os._exit(7)


class ExitingPolitely(Failing):
    """Asks the interpreter to end, as a careless command-line tool does."""

    def fail(self, index: int) -> None:
        sys.exit("goodbye")


class Leaving(Failing):
    """Raises what a generator raises when it is closed."""

    def fail(self, index: int) -> None:
        raise GeneratorExit("left")


class PanicException(BaseException):
    """As pyo3's, which libraries in Rust raise: no Exception."""


class Panicking(Failing):
    """Is decoded by a library in Rust."""

    def fail(self, index: int) -> None:
        raise PanicException(f"range end index {index} out of range")


class PanickingFilled(Panicking, FailingFilled):
    """The same through `read_batch`."""


class Crashing(Failing):
    """Reads where there is no memory."""

    def fail(self, index: int) -> None:
        ctypes.string_at(0)


class Hanging(Failing):
    """Never comes back."""

    def fail(self, index: int) -> None:
        time.sleep(3600)


class HangingOnce(Failing):
    """Does not come back at the first reading of a bad sample; `marks` is a folder in which it notes that it was."""

    def __init__(self, marks: str, size: int = 64, bad: Sequence[int] = ()) -> None:
        super().__init__(size, bad)
        self.marks = marks

    def fail(self, index: int) -> None:
        mark = Path(self.marks) / str(index)
        if not mark.exists():
            mark.touch()
            self.fail_once()

    def fail_once(self) -> None:
        time.sleep(3600)


class ExitingOnce(HangingOnce):
    """Ends its process at the first reading of a bad sample."""

    def fail_once(self) -> None:
        os._exit(7)


class HoldingTheInterpreter(Failing):
    """Never comes back and never lets another thread of its process run."""

    def fail(self, index: int) -> None:
        os.write(1, b"held up\n")
        ctypes.PyDLL(None).sleep(3600)


class LeavingChildren(Failing):
    """Ends its process, of which a child lives on with all that was open."""

    def __init__(self, marks: str, size: int = 64, bad: Sequence[int] = ()) -> None:
        super().__init__(size, bad)
        self.marks = marks

    def fail(self, index: int) -> None:
        mark = Path(self.marks) / str(index)
        if mark.exists():
            return
        mark.touch()
        child = os.fork()
        if child == 0:
            time.sleep(3600)
            os._exit(0)
        mark.write_text(str(child))
        os._exit(7)


class Arrays:
    """Rows of one large array: {"row": int64 [columns]}."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return {"row": self.rows[index]}


class Describing:
    """Tells about the process that reads: {"pid": int64 [], "has_oneflow": bool [], "private_kb": int64 []}."""

    def __init__(self, size: int = 64, ballast: np.ndarray | None = None) -> None:
        self.size = size
        self.ballast = ballast

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        touched = 0 if self.ballast is None else int(self.ballast.sum())
        return {
            "pid": os.getpid(),
            "has_oneflow": "oneflow" in sys.modules,
            "private_kb": private_kilobytes(),
            "touched": touched,
        }


def private_kilobytes() -> int:
    """Memory that this process shares with no other.

    Neither figure of the system alone tells: a page of a shared file counts as private while one process maps it, and
    what a forked process has of its parent counts as anonymous.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return min(kilobytes["Anonymous"], kilobytes["Private_Clean"] + kilobytes["Private_Dirty"])


class WithFunction(Numbers):
    """Has a function, perhaps a lambda."""

    def __init__(self, function: Callable[[int], Any], size: int = 16) -> None:
        super().__init__(size)
        self.function = function

    def __getitem__(self, index: int) -> Any:
        return {"value": self.function(index)}


class OpenFile(Numbers):
    """Has a file open since it was made, which no other program can have."""

    def __init__(self, path: str, size: int = 16) -> None:
        super().__init__(size)
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115

    def __getitem__(self, index: int) -> Any:
        return {"byte": os.pread(self.file.fileno(), 1, index)[0]}


class FlowTensors(Numbers):
    """Its samples are OneFlow tensors, as those of LiBai's datasets."""

    job_variables = -1

    def __getitem__(self, index: int) -> Any:
        if self.job_variables < 0:  # OneFlow sets its own, so they are counted before its import.
            names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
            self.job_variables = sum(name in os.environ for name in names)
        import oneflow as flow

        data = flow.tensor([index, index + 1], dtype=flow.int64)
        return Instance(
            data=DistTensorData(data),
            job_variables=DistTensorData(np.array(self.job_variables)),
            world_size=DistTensorData(np.array(flow.env.get_world_size())),
        )


def stack_dicts(samples: list[Any]) -> dict[str, np.ndarray]:
    """A user's collator: dict in, dict out."""
    fields = [s if isinstance(s, dict) else {k: v.tensor for k, v in s.get_fields().items()} for s in samples]
    return {name: np.stack([np.asarray(field[name]) for field in fields]) for name in fields[0]}


def growing_collator(samples: list[Any]) -> dict[str, np.ndarray]:
    """Its batches have as many columns as the first sample says."""
    index = int(np.asarray(samples[0]["index"]))
    return {"wide": np.full((len(samples), index * 100 + 1), index), "index": np.array([s["index"] for s in samples])}


def failing_collator(samples: list[Any]) -> Any:
    """Fails when sample 5 is among its samples."""
    if any(int(np.asarray(sample["index"])) == 5 for sample in samples):
        raise ZeroDivisionError("five")
    return stack_dicts(samples)


def panicking_collator(samples: list[Any]) -> Any:
    """Fails as a library in Rust when sample 5 is among its samples."""
    try:
        return failing_collator(samples)
    except ZeroDivisionError:
        raise PanicException from None


def unstoppable_collator(samples: list[Any]) -> Any:
    """Fails with what usually ends a loop in silence."""
    raise StopIteration


def flow_collator(samples: list[Any]) -> Instance:
    """Makes OneFlow tensors, as LiBai's collators do."""
    return Instance.stack(samples)


class Unspeakable(Failing):
    """Raises an exception whose text cannot be had."""

    def fail(self, index: int) -> None:
        raise Speechless


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Printing(Failing):
    """Prints to standard error, and ends its process."""

    def fail(self, index: int) -> None:
        print("the licence has expired", file=sys.stderr)
        os._exit(3)


class Tidying(Numbers):
    """Has things that a process must tidy up at its exit; `marks` is a folder in which it notes what it has.

    Args:
        seconds: that its exit handler takes.
    """

    def __init__(self, marks: str, seconds: float = 0.0) -> None:
        super().__init__()
        self.marks, self.seconds = Path(marks), seconds
        self.folder: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.folder is None:
            self.folder = tempfile.TemporaryDirectory(dir=self.marks, prefix="folder-")
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
            child.start()
            (self.marks / f"child-{child.pid}").touch()
            (self.marks / f"worker-{os.getpid()}").touch()
            atexit.register(self.tidy)
        return super().__getitem__(index)

    def tidy(self) -> None:
        time.sleep(self.seconds)
        (self.marks / f"worker-{os.getpid()}").unlink()


class OnlyHere(Numbers):
    """Raises an error in the process that unpickles it."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> Any:
    raise OSError("only here")


class DeadlyToUnpack(Numbers):
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return _die, ()


def _die() -> Any:
    os._exit(9)


class Scaled:
    """A dataset, or the function of one, that its user changes between epochs."""

    def __init__(self) -> None:
        self.factor = 1
        self.table = [0]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self({"x": index + self.table[0]})

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": sample["x"] * self.factor}


class Rows:
    """50 samples; some may be broken."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.broken:
            raise OSError(f"sample {index} cannot be read")
        return {"x": np.full((2, 3), index, dtype=np.float32), "y": index}
