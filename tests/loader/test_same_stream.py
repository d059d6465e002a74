"""Neither the number of workers nor their kind changes one bit of what comes (promises 1 to 3 of the design)."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from libai_data.data.samplers import CyclicSampler, SingleRoundSampler
from tests.loader.sample_datasets import NumberDicts, Numbers, NumbersFilled, NumbersTogether, stack_dicts
from tests.loader.streams import content, loading, stream
from tests.properties import examples, slowly

DATASETS = (Numbers, NumberDicts, NumbersTogether, NumbersFilled)
with_workers = settings(suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.reuse, Phase.generate])

cheap_workers = st.fixed_dictionaries(
    {"num_workers": st.integers(1, 5), "worker_type": st.just("thread"), "prefetch": st.integers(1, 9)}
)
processes = st.fixed_dictionaries(
    {"num_workers": st.integers(1, 3), "start_method": st.just("fork"), "prefetch": st.integers(1, 9)}
)


@st.composite
def streams(draw: Any) -> dict[str, Any]:
    size = draw(st.integers(1, 50))
    batch = draw(st.integers(1, min(size, 9)))
    ranks = draw(st.integers(1, size // batch))
    return {
        "dataset": draw(st.sampled_from(DATASETS))(size),
        "cyclic": draw(st.booleans()),
        "sampler": {
            "micro_batch_size": batch,
            "shuffle": draw(st.booleans()),
            "data_parallel_rank": draw(st.integers(0, ranks - 1)),
            "data_parallel_size": ranks,
            "seed": draw(st.integers(0, 2**40)),
            "drop_last": draw(st.booleans()),
        },
        "loader": {"collate_fn": draw(st.sampled_from([None, stack_dicts])), "seed": draw(st.integers(0, 2**40))},
    }


def sampler_of(case: dict[str, Any]) -> Any:
    return (CyclicSampler if case["cyclic"] else SingleRoundSampler)(case["dataset"], **case["sampler"])


def contents_and_states(case: dict[str, Any], batches: int, **workers: Any) -> Any:
    """Contents of the batches of three epochs, and the state after each."""
    found = []
    with loading(case["dataset"], sampler_of(case), **case["loader"], **workers) as loader:
        for _ in range(3):
            for batch in islice(loader, batches):
                found.append((content(batch), loader.state_dict()))
    return found


@pytest.mark.watchdog(120)
@settings(with_workers, max_examples=examples(40))
@given(case=streams(), workers=st.one_of(processes, cheap_workers), batches=st.integers(1, 12))
def test_workers_bring_the_stream_of_the_trainers_own_process(
    case: dict[str, Any], workers: dict[str, Any], batches: int
) -> None:
    assert contents_and_states(case, batches, **workers) == contents_and_states(case, batches, num_workers=0)


@pytest.mark.watchdog(120)
@pytest.mark.parametrize("dataset", [*DATASETS[:2], *map(slowly, DATASETS[2:])])
@pytest.mark.parametrize("collate_fn", [None, slowly(stack_dicts)])
def test_spawned_workers_bring_the_stream_of_the_trainers_own_process(dataset: Any, collate_fn: Any) -> None:
    case = {
        "dataset": dataset(37),
        "cyclic": True,
        "sampler": {"micro_batch_size": 5, "shuffle": True, "seed": 3},
        "loader": {"collate_fn": collate_fn, "seed": 9},
    }
    found = contents_and_states(case, 20, num_workers=3, start_method="spawn", prefetch=3)
    assert found == contents_and_states(case, 20, num_workers=0)


def test_all_ways_of_reading_bring_the_same_stream() -> None:
    ways = [stream(dataset(41), CyclicSampler(range(41), 6, True), 30, seed=4) for dataset in DATASETS]
    bare = [[{name: field[:3] for name, field in fields.items()} for _, fields in way] for way in ways]
    assert bare[0] == bare[1] == bare[2] == bare[3]


@settings(with_workers, max_examples=examples(20))
@given(case=streams(), taken=st.integers(0, 15), data=st.data())
def test_a_state_saved_after_any_batch_goes_on_exactly_with_other_workers(
    case: dict[str, Any], taken: int, data: st.DataObject
) -> None:
    in_process: st.SearchStrategy[dict[str, Any]] = st.just({"num_workers": 0})
    kinds = [in_process, cheap_workers] + [processes] * data.draw(st.sampled_from([0, 0, 1]))
    before, after = data.draw(st.one_of(kinds)), data.draw(st.one_of(kinds))
    with loading(case["dataset"], sampler_of(case), **case["loader"], num_workers=0) as loader:
        whole = [content(batch) for batch in islice(loader, taken + 8)]
    with loading(case["dataset"], sampler_of(case), **case["loader"], **before) as loader:
        assert [content(batch) for batch in islice(loader, taken)] == whole[:taken]
        state = json.loads(json.dumps(loader.state_dict()))
    taken = min(taken, len(whole))
    with loading(case["dataset"], sampler_of(case), **case["loader"], **after) as loader:
        loader.load_state_dict(state)
        assert [content(batch) for batch in islice(loader, len(whole) - taken)] == whole[taken:]
