"""Each kind of iterable, made by the real library where it can be installed, gives its rows, round after round, and
resumes at every cut point."""

from __future__ import annotations

import copy
import importlib
import io
import sys
import tarfile
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from libai_data import DataLoader
from libai_data.data.datasets import FilteredDataset
from libai_data.errors import SampleError, SchemaError
from libai_data.iterables import from_iterable
from libai_data.iterables.kinds import yields_batches
from libai_data.loader import BatchLoader
from tests.iterables.rows import Joined, Rewinding, flat, numbers, resumed, sample, taken
from tests.properties import few_of, is_long_run

ROWS = 22
FOLDER: Path


@dataclass(frozen=True)
class Kind:
    make: Callable[[], Any]  # makes one of `ROWS` rows, as each new process would
    needs: str | None = None  # the library
    options: dict[str, Any] = field(default_factory=dict)  # of `from_iterable`
    is_map_style: bool = False  # it gives samples by their index
    changes: bool = False  # each round has another order
    cuts: Sequence[int] = range(9)  # batches to stop after


class Numbered:
    """A dataset as torch's are: a length and tuples of tensors."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full((2, 3), float(index)), index


def torch_loader(**options: Any) -> Any:
    import torch

    generator = torch.Generator()
    generator.manual_seed(5)
    return torch.utils.data.DataLoader(Numbered(), batch_size=3, generator=generator, **options)


def torch_pipe(*, is_batched: bool = True) -> Any:
    from torch.utils.data.datapipes.iter import IterableWrapper

    batches = IterableWrapper([sample(number) for number in range(ROWS)]).batch(3).collate().map(dict)
    return batches if is_batched else batches.map(np_rows).unbatch()


def torch_pipe_loader() -> Any:
    import torch

    return torch.utils.data.DataLoader(torch_pipe(), batch_size=None)


def np_rows(batch: Any) -> list[Any]:
    return [{name: values[row] for name, values in batch.items()} for row in range(len(batch["y"]))]


def fabric_loader() -> Any:
    return pytest.importorskip("lightning_fabric.wrappers")._FabricDataLoader(torch_loader())


def lightnings_combined_loader() -> Any:
    from pytorch_lightning.trainer.supporters import CombinedLoader

    return CombinedLoader(torch_loader())


class CombinedLoader:
    """What CombinedLoader of Lightning 2, which wants a newer torch, looks like from outside."""

    __module__ = "lightning.pytorch.utilities.combined_loader"

    def __iter__(self) -> Iterator[Any]:
        return ((batch, number, 0) for number, batch in enumerate(torch_loader()))


def stateful_loader() -> Any:
    """What torchdata's StatefulDataLoader, which wants a newer torch, looks like from outside."""
    return Joined(Rewinding(range(ROWS)), 3)


def grain_map(batch: int = 0) -> Any:
    import grain

    return grain.MapDataset.source([sample(number) for number in range(ROWS)]).shuffle(seed=3)


def grain_iter(batch: int = 0) -> Any:
    dataset = grain_map().to_iter_dataset()
    return dataset.batch(batch).map(dict) if batch else dataset


def grain_loader(batch: int = 0) -> Any:
    import grain

    sampler = grain.samplers.IndexSampler(
        ROWS, shard_options=grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=7
    )
    operations = [grain.transforms.Batch(batch)] if batch else []
    return grain.DataLoader(
        data_source=[sample(number) for number in range(ROWS)], sampler=sampler, operations=operations
    )


def hugging_face() -> Any:
    import datasets

    return datasets.Dataset.from_dict(
        {"x": [np.full((2, 3), number, np.float32).tolist() for number in range(ROWS)], "y": list(range(ROWS))}
    )


def hugging_face_stream(buffer: int = 0) -> Any:
    stream = hugging_face().to_iterable_dataset(num_shards=2)
    return stream.shuffle(seed=1, buffer_size=buffer) if buffer else stream


def joined_hugging_face_streams() -> Any:
    import datasets

    halves = [hugging_face().select(range(first, first + ROWS // 2)) for first in (0, ROWS // 2)]
    return datasets.concatenate_datasets(
        [half.to_iterable_dataset().shuffle(seed=seed, buffer_size=7) for seed, half in enumerate(halves)]
    )


def webdataset() -> Any:
    import webdataset

    return webdataset.WebDataset(str(FOLDER / "rows.tar"), shardshuffle=False).decode().to_tuple("x.npy", "y.cls")


def web_loader(batch: int = 0) -> Any:
    from webdataset import WebLoader

    return WebLoader(webdataset().batched(batch), batch_size=None) if batch else WebLoader(webdataset(), batch_size=3)


def oneflow_loader(**options: Any) -> Any:
    import oneflow as flow
    from oneflow.utils.data import DataLoader, TensorDataset

    x = flow.arange(ROWS).reshape(ROWS, 1, 1).expand(ROWS, 2, 3).to(flow.float32)
    generator = flow.Generator()
    generator.manual_seed(5)
    return DataLoader(TensorDataset(x, flow.arange(ROWS)), batch_size=3, generator=generator, **options)


def dali_reader() -> Any:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=5, num_threads=1, device_id=None, seed=4)
    def read() -> Any:
        files = [str(FOLDER / f"{number}.bin") for number in range(ROWS)]
        _, label = fn.readers.file(files=files, name="reader", shuffle_after_epoch=True)
        return fn.cast(fn.cat(*[label] * 6), dtype=types.FLOAT), label

    return read()


class DaliIterator:
    """What DALI's iterators, whose torch plugin wants a newer torch, look like from outside: a list of dicts, one for
    each pipeline, from an iterator that is to be reset."""

    __module__ = "nvidia.dali.plugin.base_iterator"

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> list[dict[str, Any]]:
        if self.at >= ROWS:
            raise StopIteration
        halves = [range(self.at, self.at + 1), range(self.at + 1, self.at + 2)]
        self.at += 2
        return [{name: np.stack([sample(number)[name] for number in half]) for name in ("x", "y")} for half in halves]

    def reset(self) -> None:
        self.at = 0


class FfcvLoader:
    """What FFCV's loader, which cannot be installed here, looks like from outside: tuples of tensors whose memory it
    uses again two batches later."""

    __module__ = "ffcv.loader.loader"

    def __iter__(self) -> Iterator[Any]:
        memory = [(np.zeros((4, 2, 3), np.float32), np.zeros((4, 1), np.int64)) for _ in range(2)]
        for number, start in enumerate(range(0, ROWS, 4)):
            rows = min(4, ROWS - start)
            x, y = (array[:rows] for array in memory[number % 2])
            y[:] = np.arange(start, start + rows)[:, None]
            x[:] = y[:, :, None]
            yield x, y


NAMES: dict[str, Any] = {"fields": ["x", "y"]}
KINDS: dict[str, Kind] = {
    "generator function": Kind(lambda: numbers, changes=True),
    "factory of iterators": Kind(lambda: lambda: map(sample, range(ROWS))),
    "list of batches": Kind(
        lambda: [{"x": np.full((2, 2, 3), n, np.float32), "y": np.full(2, n)} for n in range(ROWS // 2)],
        options={"batches": True},
    ),
    "list of samples": Kind(lambda: [sample(number) for number in range(ROWS)], is_map_style=True),
    "torch dataset": Kind(Numbered, "torch", NAMES, is_map_style=True),
    "torch DataLoader": Kind(torch_loader, "torch", NAMES),
    "shuffling torch DataLoader": Kind(lambda: torch_loader(shuffle=True), "torch", NAMES, changes=True),
    "torch DataLoader with workers": Kind(lambda: torch_loader(num_workers=1), "torch", NAMES, cuts=(4, 7)),
    "torch data pipe of batches": Kind(torch_pipe, "torch"),
    "torch data pipe of batches taken apart": Kind(lambda: torch_pipe(is_batched=False), "torch"),
    "torch DataLoader of a data pipe": Kind(torch_pipe_loader, "torch"),
    "Fabric's DataLoader": Kind(fabric_loader, "lightning_fabric", NAMES),
    "Lightning's CombinedLoader": Kind(lightnings_combined_loader, "pytorch_lightning", NAMES),
    "CombinedLoader of Lightning 2": Kind(CombinedLoader, "torch", NAMES),
    "OneFlow DataLoader": Kind(oneflow_loader, None, NAMES),
    "shuffling OneFlow DataLoader": Kind(lambda: oneflow_loader(shuffle=True), None, NAMES, changes=True, cuts=(4,)),
    "OneFlow dataset": Kind(lambda: oneflow_loader().dataset, None, NAMES, is_map_style=True),
    "StatefulDataLoader's protocol": Kind(stateful_loader, options={"batches": True}),
    "Grain MapDataset": Kind(grain_map, "grain", is_map_style=True),
    "Grain IterDataset": Kind(grain_iter, "grain"),
    "Grain IterDataset of batches": Kind(lambda: grain_iter(3), "grain"),
    "Grain MapDataset of batches": Kind(lambda: grain_map().batch(3), "grain"),
    "Grain DataLoader of batches": Kind(lambda: grain_loader(3), "grain", cuts=(4,)),
    "Grain DataLoader": Kind(grain_loader, "grain", cuts=(0, 3, 8)),
    "Hugging Face dataset": Kind(hugging_face, "datasets", is_map_style=True),
    "Hugging Face stream": Kind(hugging_face_stream, "datasets"),
    "Hugging Face stream of batches": Kind(lambda: hugging_face_stream().batch(3), "datasets", cuts=(4,)),
    "shuffling Hugging Face stream": Kind(lambda: hugging_face_stream(7), "datasets", changes=True),
    "joined shuffling Hugging Face streams": Kind(
        joined_hugging_face_streams, "datasets", changes=True, cuts=(3, 4, 8)
    ),
    "WebDataset": Kind(webdataset, "webdataset", NAMES),
    "WebDataset of batches": Kind(lambda: webdataset().batched(3), "webdataset", NAMES, cuts=(4,)),
    "WebDataset of batches taken apart": Kind(
        lambda: webdataset().batched(3).unbatched(), "webdataset", NAMES, cuts=(4,)
    ),
    "WebLoader": Kind(web_loader, "webdataset", NAMES, cuts=(4,)),
    "WebLoader of batches": Kind(lambda: web_loader(3), "webdataset", NAMES, cuts=(4,)),
    "DALI pipeline": Kind(dali_reader, "nvidia.dali", NAMES, changes=True),
    "DALI iterator's protocol": Kind(DaliIterator),
    "FFCV loader's protocol": Kind(FfcvLoader, options=NAMES),
}


@pytest.fixture(scope="module", autouse=True)
def _files(tmp_path_factory: pytest.TempPathFactory) -> None:
    global FOLDER
    FOLDER = tmp_path_factory.mktemp("rows")
    with tarfile.open(FOLDER / "rows.tar", "w") as archive:
        for number in range(ROWS):
            (FOLDER / f"{number}.bin").write_bytes(bytes([number]))
            array = io.BytesIO()
            np.save(array, sample(number)["x"])
            for ending, content in (("x.npy", array.getvalue()), ("y.cls", str(number).encode())):
                member = tarfile.TarInfo(f"{number:04}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


RESUMED = [
    *("generator function", "torch DataLoader with workers", "StatefulDataLoader's protocol", "WebDataset"),
    "joined shuffling Hugging Face streams",
]
ONE_OF_EACH = [
    *("factory of iterators", "list of samples", "list of batches", "shuffling torch DataLoader", "OneFlow DataLoader"),
    *("Grain IterDataset", "Grain IterDataset of batches", "Hugging Face stream", "WebLoader", "WebLoader of batches"),
    "DALI pipeline",
]
REUSING = ["list of batches", "torch DataLoader", "DALI iterator's protocol", "FFCV loader's protocol"]
"""Kinds that the short run resumes, reads round after round, and keeps batches of."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    found = KINDS[request.param]
    if found.needs is not None:
        try:
            importlib.import_module(found.needs)
        except ImportError as error:
            pytest.skip(f"{found.needs} is missing ({error}); pip install 'libai_data[integrations]'")
    return found


@pytest.mark.parametrize("kind", few_of(KINDS, *ONE_OF_EACH), indirect=True)
def test_each_row_comes_once_a_round_in_batches_of_the_size_asked_for(kind: Kind) -> None:
    loader = from_iterable(kind.make(), 4, ends="pad", **kind.options)
    rounds = [taken(loader), taken(loader)]
    for batches in rounds:
        assert sorted(flat(batches)) == sorted(flat(rounds[0]))
        assert len(flat(batches)) == ROWS
        assert [len(rows) for _, rows in batches] == [4] * 6
        assert [info.valid for info, _ in batches] == [4] * 5 + [2]
        first = batches[0][0].position  # Of what gives samples by their index, positions go on.
        assert [info.position - first for info, _ in batches] == [0, 4, 8, 12, 16, 20]
    assert (flat(rounds[0]) != flat(rounds[1])) == kind.changes
    assert isinstance(loader, BatchLoader) == kind.is_map_style


@pytest.mark.parametrize("kind", few_of(KINDS, *RESUMED), indirect=True)
def test_it_resumes_at_every_cut_point(kind: Kind) -> None:
    """Of the second round too, for some cuts: of a kind whose rounds differ."""
    loader = from_iterable(kind.make(), 4, ends="cycle", **kind.options)
    whole = taken(loader, 14)
    assert sorted(flat(whole)[:ROWS]) == sorted(flat(whole)[ROWS : 2 * ROWS])
    for cut in kind.cuts if is_long_run() else kind.cuts[::5]:
        assert resumed(kind.make, cut, 3, micro_batch_size=4, ends="cycle", **kind.options) == whole[cut : cut + 3], cut


@pytest.mark.slow
def test_rounds_resume_too(kind: Kind) -> None:
    loader = from_iterable(kind.make(), 4, ends="drop", **kind.options)
    whole = taken(loader)
    assert len(whole) == 5
    for cut in (1, 4):
        assert resumed(kind.make, cut, 9, micro_batch_size=4, ends="drop", **kind.options) == whole[cut:]


@pytest.mark.parametrize("kind", few_of(KINDS, *REUSING), indirect=True)
def test_batches_that_are_kept_stay_what_they_were(kind: Kind) -> None:
    loader = from_iterable(kind.make(), 4, ends="drop", **kind.options)
    kept = [(batch, copy.deepcopy(batch.y.tensor.numpy())) for batch in loader]
    for batch, before in kept:
        assert (batch.y.tensor.numpy() == before).all()


def test_webdataset_needs_no_node_splitter_and_may_not_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    webdataset_module = pytest.importorskip("webdataset")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    loader = from_iterable(webdataset(), 4, ends="pad", **NAMES)
    assert flat(taken(loader)) == list(range(ROWS))
    splits = webdataset_module.WebDataset(
        str(FOLDER / "rows.tar"), shardshuffle=False, nodesplitter=webdataset_module.split_by_node
    )
    with pytest.raises(ValueError, match="split_by_node"):
        from_iterable(splits, 4)


def test_no_tool_is_imported_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch", "grain", "webdataset", "datasets", "nvidia.dali", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, module, None)
    loader = from_iterable(numbers, 4, ends="drop")
    assert len(taken(loader)) == 5
    assert not isinstance(sys.modules["torch"], types.ModuleType)


class ResumableShuffle:
    """An iterable that goes on where its own state says, as generators over `self.at` do."""

    def __init__(self) -> None:
        self.at = self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        for number in list(numbers(self.epoch))[self.at :]:
            self.at += 1
            yield number
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class EpochShuffle(ResumableShuffle):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("readers", ["every_rank", "node", "rank0"])
@pytest.mark.parametrize(("ends", "cut"), [("cycle", 11), ("short", 6), ("pad", 6), ("drop", 5)])
def test_a_state_at_the_end_of_a_round_does_not_read_the_round_again(ends: str, cut: int, readers: str) -> None:
    # The end of the round comes within a group of rows that are fetched together.
    found = resumed(EpochShuffle, cut, 5, micro_batch_size=4, ends=ends, prefetch=1, readers=readers)
    next_epoch = 2 if ends == "cycle" else 1
    assert flat(found) == [sample["y"] for sample in numbers(next_epoch)][:20]
    assert {info.epoch for info, _ in found} == {next_epoch}


def test_a_pass_after_a_break_begins_its_round_from_the_first_row() -> None:
    loader = from_iterable(EpochShuffle(), 4, prefetch=1)
    for epoch in range(3):
        assert flat(taken(loader, 2)) == [sample["y"] for sample in numbers(epoch)][:8]


def test_what_goes_on_in_the_middle_after_a_break_is_refused() -> None:
    loader = from_iterable(ResumableShuffle(), 4, prefetch=1)
    for _ in range(2):
        assert len(flat(taken(loader))) == 22
    taken(loader, 2)
    with pytest.raises(SampleError, match=r"ResumableShuffle was interrupted in the middle.*set_epoch"):
        taken(loader, 1)


def test_batches_of_grain_are_found_below_later_stages() -> None:
    grain = pytest.importorskip("grain")
    batched = grain_map().batch(3)
    for of_batches in (batched.map(dict).repeat(2), batched.to_iter_dataset().map(dict), batched.shuffle(seed=1)):
        assert yields_batches(of_batches)
    assert [len(batch["y"]) for batch in from_iterable(batched.to_iter_dataset(), 4)] == [4] * 5 + [2]
    apart = type("Apart", (grain.experimental.FlatMapTransform,), {"max_fan_out": 3, "flat_map": lambda self, b: [b]})
    for of_samples in (grain_map().to_iter_dataset(), grain.experimental.FlatMapMapDataset(batched, apart())):
        assert not yields_batches(of_samples)
    operations = [grain.transforms.Batch(3), type("Kept", (grain.transforms.Map,), {"map": lambda self, b: b})()]
    sampler = grain.samplers.SequentialSampler(ROWS)
    rows = [sample(number) for number in range(ROWS)]
    assert yields_batches(grain.DataLoader(data_source=rows, sampler=sampler, operations=operations))
    assert not yields_batches(grain.DataLoader(data_source=rows, sampler=sampler, operations=[apart()]))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shards_of_concatenated_hugging_face_streams_continue_at_every_cut(num_workers: int) -> None:
    datasets = pytest.importorskip("datasets")
    # More rows than a shard reads at a time: there is a state within each shard.
    parts = [datasets.Dataset.from_dict({"y": [*range(start, start + 200)]}) for start in (0, 200)]
    streams = [part.to_iterable_dataset(num_shards=count) for count, part in enumerate(parts, 1)]
    whole = datasets.concatenate_datasets([streams[0].map(dict), streams[1]])
    loaders = [from_iterable(whole, 100, num_shards=3, num_workers=num_workers) for _ in range(2)]
    expected = [batch["y"].numpy().tolist() for batch in loaders[0]]
    assert sorted(label for labels in expected for label in labels) == [*range(400)]
    for cut in (1, 2, 3):
        loaders[0].set_epoch(0)
        batches = iter(loaders[0])
        for _ in range(cut):
            next(batches)
        loaders[1].load_state_dict(loaders[0].state_dict())
        assert [batch["y"].numpy().tolist() for batch in loaders[1]] == expected[cut:]
    for loader in loaders:
        loader.close()


def test_batches_of_hugging_face_are_found_below_later_stages() -> None:
    pytest.importorskip("datasets")
    batched = hugging_face_stream().batch(3)
    arrays = hugging_face_stream().with_format("numpy").batch(3)
    for of_batches in (batched, batched.map(dict), batched.take(2), arrays):
        assert yields_batches(of_batches)
    assert [len(batch["y"]) for batch in from_iterable(batched, 4)] == [4] * 5 + [2]

    def batch_fn(samples: Any) -> Any:
        return dict(samples)

    stream = hugging_face_stream()
    for of_samples in (stream, batched.map(dict, batched=True), stream.map(batch_fn, batched=True)):
        assert not yields_batches(of_samples)


def test_samples_that_a_dataset_of_grain_drops_are_named_and_skipped_as_documented() -> None:
    pytest.importorskip("grain")
    kept = grain_map().filter(lambda sample: sample["y"] % 2).map(dict)
    with pytest.raises(SchemaError, match=r"the item is None.*did a filter drop it"):
        list(DataLoader(kept, 4))
    expected = [row["y"] for row in kept.to_iter_dataset()]
    assert len(expected) == ROWS // 2
    for source in (kept.to_iter_dataset(), FilteredDataset(kept, lambda sample: sample is not None)):
        assert flat(taken(DataLoader(source, 4))) == expected


def test_a_wrong_state_of_grain_after_the_first_batch_of_a_later_epoch_loses_no_rows() -> None:
    grain = pytest.importorskip("grain")

    def shuffled() -> Any:
        return grain.experimental.WindowShuffleIterDataset(grain_iter(), window_size=5, seed=1)

    stopped, again = (from_iterable(shuffled(), 4) for _ in range(2))
    whole = taken(stopped)
    taken(stopped, 1)
    again.load_state_dict(stopped.state_dict())
    assert flat(taken(again)) == flat(whole)[4:]
