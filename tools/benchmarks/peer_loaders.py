"""The loaders that people would use instead; also the program that measures one of them, in its own environment.

Needs nothing but numpy and the loader's packages. The program reads lines with seconds, and answers by lines of JSON.
"""

from __future__ import annotations

import importlib
import io
import itertools
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import numpy as np

from tools.benchmarks.samples import FIELDS, IMAGE_SHAPE, JPEG, MEAN, SAMPLES, STD
from tools.benchmarks.timing import BATCH, seconds_a_batch

WORKERS = 2
_MANY = 10**7

Batches = Iterator[dict[str, Any]]


class Decoded:
    """Samples of photographs, decoded by Pillow and transformed by torchvision, as most people do.

    Args:
        samples: paths and labels.
    """

    def __init__(self, samples: Any) -> None:
        v2 = importlib.import_module("torchvision.transforms.v2")
        self.samples = samples
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop(IMAGE_SHAPE[1:], antialias=True),
                v2.RandomHorizontalFlip(),
                v2.PILToTensor(),
                v2.ToDtype(importlib.import_module("torch").float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, label = self.samples[index]
        return {"images": self.decode(path), "labels": label}

    def decode(self, file: Any) -> np.ndarray:
        """A file, or its path, as float32 [3, 224, 224]."""
        from PIL import Image

        with Image.open(file) as image:
            pixels: np.ndarray = self.transform(image.convert("RGB")).numpy()
        return pixels


def _samples(work: str, folder: Path) -> Any:
    samples = SAMPLES[work](str(folder / work))
    return Decoded(samples) if work == JPEG else samples


def _by_torch(loader_class: Any, dataset: Any, **options: Any) -> Batches:
    loader = loader_class(dataset, BATCH, num_workers=WORKERS, persistent_workers=True, drop_last=True, **options)
    while True:
        yield from loader


def torch(work: str, folder: Path) -> Batches:
    """PyTorch's DataLoader, shuffled over epochs without a pause between them."""
    data = importlib.import_module("torch.utils.data")
    samples = _samples(work, folder)
    return _by_torch(data.DataLoader, samples, sampler=data.RandomSampler(samples, num_samples=_MANY))


def torchdata(work: str, folder: Path) -> Batches:
    """StatefulDataLoader, whose state can be saved after each batch."""
    stateful = importlib.import_module("torchdata.stateful_dataloader")
    data = importlib.import_module("torch.utils.data")
    samples = _samples(work, folder)
    return _by_torch(stateful.StatefulDataLoader, samples, sampler=data.RandomSampler(samples, num_samples=_MANY))


def grain(work: str, folder: Path) -> Batches:
    """Grain's DataLoader; its batches are numpy arrays."""
    grain = importlib.import_module("grain.python")
    samples = _samples(work, folder)
    sampler = grain.IndexSampler(len(samples), grain.NoSharding(), shuffle=True, num_epochs=None, seed=0)
    batch = [grain.Batch(BATCH, drop_remainder=True)]
    return iter(grain.DataLoader(data_source=samples, sampler=sampler, operations=batch, worker_count=WORKERS))


def streaming(work: str, folder: Path) -> Batches:
    """MosaicML Streaming: the same records, written as its own shards, in PyTorch's DataLoader."""
    streaming = importlib.import_module("streaming")
    data = importlib.import_module("torch.utils.data")
    source = SAMPLES[work](str(folder / work))
    decode = Decoded(source).decode if work == JPEG else None
    columns = {name: _mds_type(work, name, shape, dtype) for name, (shape, dtype) in FIELDS[work].items()}

    class Samples(streaming.StreamingDataset):  # type: ignore[name-defined]
        def __getitem__(self, index: int) -> dict[str, Any]:
            sample = super().__getitem__(index)
            if decode:
                sample["images"] = decode(io.BytesIO(sample["images"]))
            return {name: _as_int64(value) for name, value in sample.items()}

    target = folder / f"{work}.mds"
    if not target.exists():
        with streaming.MDSWriter(out=str(target), columns=columns) as writer:
            for index in range(len(source)):
                writer.write(_mds_record(work, source[index]))
    dataset = Samples(local=str(target), shuffle=True, batch_size=BATCH, epoch_size=100 * len(source))
    return _by_torch(data.DataLoader, dataset)


def _mds_type(work: str, name: str, shape: tuple[int, ...], dtype: str) -> str:
    if name == "labels" and not shape:
        return "int"
    if work == JPEG:
        return "bytes"
    # Tokens are as small as in the memory map.
    stored = "uint16" if dtype == "int64" else dtype
    return f"ndarray:{stored}:{','.join(map(str, shape))}"


def _mds_record(work: str, sample: Any) -> dict[str, Any]:
    if work == JPEG:
        return {"images": Path(sample[0]).read_bytes(), "labels": sample[1]}
    small = {name: value.astype(np.uint16) if value.dtype == np.int64 else value for name, value in sample.items()}
    return {name: int(value) if not value.ndim else value for name, value in small.items()}


def _as_int64(value: Any) -> Any:
    return value.astype(np.int64) if isinstance(value, np.ndarray) and value.dtype == np.uint16 else value


def spdl(work: str, folder: Path) -> Batches:
    """SPDL: threads that make whole batches; photographs are decoded, cut and flipped by its own FFmpeg."""
    pipeline = importlib.import_module("spdl.pipeline")
    samples = SAMPLES[work](str(folder / work))
    make = _SpdlPhotographs(samples) if work == JPEG else _Stacked(samples)
    builder = pipeline.PipelineBuilder().add_source(_shuffled(len(samples)))
    built = builder.pipe(make, concurrency=WORKERS).add_sink(3).build(num_threads=WORKERS)
    with built.auto_stop():
        yield from built.get_iterator()


class _Stacked:
    """Batches of samples, stacked by numpy."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __call__(self, indices: list[int]) -> dict[str, np.ndarray]:
        samples = [self.samples[index] for index in indices]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


class _SpdlPhotographs:
    """Batches of photographs, which FFmpeg crops, flips and scales while it decodes, and numpy normalises."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples
        self.io = importlib.import_module("spdl.io")
        self.mean = np.array(MEAN, np.float32).reshape(3, 1, 1) * 255
        self.factor = 1 / (np.array(STD, np.float32).reshape(3, 1, 1) * 255)
        try:
            self([0])
        except RuntimeError as error:  # A pipeline would log it for each batch, and yield none.
            raise ImportError(f"FFmpeg's shared libraries: {error}") from error

    def __call__(self, indices: list[int]) -> dict[str, np.ndarray]:
        chosen = [self.samples[index] for index in indices]
        random = np.random.default_rng()
        frames = [self._decoded(path, random) for path, _ in chosen]
        pixels = self.io.to_numpy(self.io.convert_frames(frames))
        images = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).astype(np.float32)
        images -= self.mean
        images *= self.factor
        return {"images": images, "labels": np.array([label for _, label in chosen])}

    def _decoded(self, path: str, random: np.random.Generator) -> Any:
        packets = self.io.demux_image(path)
        width, height = packets.codec.width, packets.codec.height
        area, ratio = width * height * random.uniform(0.08, 1), np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        wide = min(width, round(np.sqrt(area * ratio)))
        high = min(height, round(np.sqrt(area / ratio)))
        left, top = random.integers(0, width - wide + 1), random.integers(0, height - high + 1)
        flip = "hflip," if random.random() < 0.5 else ""
        cut = f"crop={wide}:{high}:{left}:{top},{flip}scale={IMAGE_SHAPE[2]}:{IMAGE_SHAPE[1]}:flags=bilinear"
        return self.io.decode_packets(packets, filter_desc=f"{cut},format=pix_fmts=rgb24")


def dali(work: str, folder: Path) -> Batches:
    """DALI on the CPU: photographs by its own operators, samples of Python by workers of its external source."""
    dali = importlib.import_module("nvidia.dali")
    fn, types = importlib.import_module("nvidia.dali.fn"), importlib.import_module("nvidia.dali.types")
    names = list(FIELDS[work])
    options = {"batch_size": BATCH, "num_threads": WORKERS, "device_id": None, "seed": 0}
    if work == JPEG:
        pipe = dali.Pipeline(**options)
        with pipe:
            files, labels = fn.readers.file(file_root=str(folder / work), random_shuffle=True)
            pixels = fn.decoders.image_random_crop(files, device="cpu", output_type=types.RGB)
            pixels = fn.resize(pixels, size=IMAGE_SHAPE[1:])
            mean, std = ([255 * value for value in values] for values in (MEAN, STD))
            mirror = fn.random.coin_flip(probability=0.5)
            images = fn.crop_mirror_normalize(
                pixels, mean=mean, std=std, mirror=mirror, dtype=types.FLOAT, output_layout="CHW"
            )
            pipe.set_outputs(images, fn.squeeze(fn.cast(labels, dtype=types.INT64), axes=0))
    else:
        pipe = dali.Pipeline(py_num_workers=WORKERS, py_start_method="spawn", **options)
        with pipe:
            source = _DaliSource(SAMPLES[work](str(folder / work)), names)
            pipe.set_outputs(*fn.external_source(source, num_outputs=len(names), parallel=True, batch=False))
    pipe.build()
    while True:
        yield {name: np.asarray(values.as_tensor()) for name, values in zip(names, pipe.run())}


class _DaliSource:
    """What DALI's workers call for each sample."""

    def __init__(self, samples: Any, names: list[str]) -> None:
        self.samples, self.names = samples, names
        self.order = np.random.default_rng(0).permutation(len(samples))

    def __call__(self, info: Any) -> tuple[np.ndarray, ...]:
        sample = self.samples[int(self.order[info.idx_in_epoch % len(self.order)])]
        return tuple(np.asarray(sample[name]) for name in self.names)


def _shuffled(samples: int) -> Iterator[list[int]]:
    """Lists of indices without end."""
    order = np.random.default_rng(0).permutation(samples)
    return itertools.cycle(order[: samples // BATCH * BATCH].reshape(-1, BATCH).tolist())


PEERS: dict[str, tuple[Callable[[str, Path], Batches], str]] = {
    "torch": (torch, "torch"),
    "torchdata": (torchdata, "torchdata"),
    "grain": (grain, "grain"),
    "streaming": (streaming, "mosaicml-streaming"),
    "spdl": (spdl, "spdl"),
    "dali": (dali, "nvidia-dali-cuda120"),
}
"""Name -> its batches, and the package that it comes with."""


def _described(batch: dict[str, Any]) -> dict[str, Any]:
    """Shape and dtype of each field."""
    return {name: [list(value.shape), str(value.dtype).rpartition(".")[2]] for name, value in batch.items()}


def main() -> None:
    """Measure the loader of the arguments (name, work, folder) as often as a line with seconds comes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What the packages print is no answer.

    def answer(**content: Any) -> None:
        print(json.dumps(content), file=answers, flush=True)

    name, work, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    try:
        batches = PEERS[name][0](work, folder)
        answer(batch=_described(next(batches)))
        for line in sys.stdin:
            cost = seconds_a_batch(lambda: next(batches), float(line))
            answer(seconds=float(cost), processor=cost.processor)
    except ImportError as error:
        answer(missing=f"{PEERS[name][1]} is not installed: {error}")
    except Exception:
        answer(failed=traceback.format_exc())
    answers.close()


if __name__ == "__main__":
    main()
