"""Trainers for the shutdown tests: `python trainers.py HOW ARGUMENTS`, each ends in another way.

They print "begun" as soon as their first batch is there.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from libai_data.data.samplers import CyclicSampler, SingleRoundSampler
from libai_data.loader import BatchLoader
from tests.loader.sample_datasets import Hanging, HoldingTheInterpreter, Slow


def begin(loader: Any) -> Iterator[Any]:
    """Take the first batch, and tell."""
    batches = iter(loader)
    next(batches)
    print("begun", flush=True)
    return batches


def go_on_for_ever(loader: Any) -> None:
    """Until something ends the process."""
    for _ in begin(loader):
        pass


def wait_for_a_held_up_sample(loader: Any) -> None:
    """Its second batch never comes."""
    next(begin(loader))


def be_interrupted(loader: Any) -> None:
    """As a trainer that catches Ctrl-C to save a checkpoint."""
    import oneflow  # noqa: F401

    try:
        go_on_for_ever(loader)
    except KeyboardInterrupt:
        print("interrupted", flush=True)


def end_without_closing(loader: Any) -> None:
    """The interpreter ends while workers read ahead."""
    begin(loader)


def raise_in_the_loop(loader: Any) -> None:
    """A trainer's own error."""
    for _ in begin(loader):
        raise RuntimeError("the model is wrong")


def end_after_the_round(loader: Any) -> None:
    """Exhausts it."""
    print(sum(1 for _ in begin(loader)) + 1)


def call_exit(loader: Any) -> None:
    """Leaves by sys.exit in the middle."""
    begin(loader)
    sys.exit(3)


def die_at_once(loader: Any) -> None:
    """Leaves no chance for cleaning up."""
    begin(loader)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the trainer named by the first argument; the second holds the loader's arguments as JSON."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    how, arguments = sys.argv[1], json.loads(sys.argv[2])
    dataset: Any = Hanging(100, bad=range(4, 100)) if arguments.pop("hangs", False) else Slow(100)
    if how == "wait_for_a_held_up_sample":
        dataset = HoldingTheInterpreter(100, bad=[5])
    sampler: Any = CyclicSampler(dataset, 4)
    if how == "end_after_the_round":
        sampler = SingleRoundSampler(dataset, 4)
    as_numpy = arguments.pop("numpy", False)  # The process starts in a third of the time, without OneFlow.
    loader = BatchLoader(dataset, sampler, **arguments)
    globals()[how](loader.numpy() if as_numpy else loader)


if __name__ == "__main__":
    main()
