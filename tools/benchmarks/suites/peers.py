"""The loader with two workers beside those that people would use instead, over the same files; and the limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Callable

from libai_data.data.datasets.gpt import GPTDataset
from tools.benchmarks.peer_loaders import PEERS, WORKERS
from tools.benchmarks.peers import libai_data_loader, oneflow_loader, peer, raw
from tools.benchmarks.photographs import FlowvisionPhotographs, decoding_processes, our_dataset, write_photographs
from tools.benchmarks.rows import AtLeast, Contender, Measure, Row, Scale
from tools.benchmarks.samples import GPT, IMAGES, JPEG, PLAIN, TOKENS, GptTokens, MappedImages, PlainTokens
from tools.benchmarks.suites.text import gather, write_corpus
from tools.benchmarks.works import FlowSamples, write_images, write_tokens

Make = Callable[[], Any]


def rows(scale: Scale) -> list[Row]:
    """The rows of the suite; files are made in `scale.folder` when they are first needed."""
    folder, quick = scale.folder, scale.quick
    plain, images = (partial(kind, str(folder / name)) for kind, name in ((PlainTokens, PLAIN), (MappedImages, IMAGES)))
    photographs, corpus = folder / JPEG, folder / Path(GPT).stem

    def row(
        work: str, file: str, prepare: Make, ours: Make, theirs: Make, limit: Contender, floors: dict[str, float]
    ) -> Row:
        contenders = (
            libai_data_loader(ours, WORKERS, scale.seconds),
            limit,
            oneflow_loader(theirs, WORKERS, scale.seconds),
            *(peer(each, file, scale) for each in PEERS),
        )
        name = Path(file).stem
        claims = [AtLeast("libai_data", each.name, floors.get(each.name)) for each in contenders[1:]]
        return Row(name, work, str(WORKERS), _prepared(contenders, prepare), tuple(claims))

    return [
        row(
            "plain dicts: 4 x int64[1024] from a uint16 memory map",
            PLAIN,
            lambda: write_tokens(folder / PLAIN, 256 if quick else 8192),
            plain,
            lambda: FlowSamples(plain()),
            raw(plain, scale.seconds),
            {"raw": 1.2, "oneflow": 9},
        ),
        row(
            "images: float32[3,224,224] from memory, and a label",
            IMAGES,
            lambda: write_images(folder / IMAGES, 64 if quick else 256),
            images,
            lambda: FlowSamples(images()),
            raw(images, scale.seconds),
            {"raw": 0.6, "oneflow": 15},
        ),
        row(
            "JPEGs of about 500 x 375: decode, RandomResizedCrop 224, flip, normalise",
            JPEG,
            lambda: write_photographs(photographs, 64 if quick else 1024),
            lambda: our_dataset(photographs),
            lambda: FlowvisionPhotographs(photographs),
            Contender("libjpeg-turbo", partial(decoding_processes, photographs, scale.seconds)),
            {"libjpeg-turbo": 0.6, "oneflow": 4, "dali": 2.2},
        ),
        row(
            "GPT samples: 2 x int64[1024] from a uint16 .bin file",
            GPT,
            lambda: write_corpus(corpus, 10**6 if quick else 2 * 10**7),
            lambda: GPTDataset(corpus, TOKENS),
            lambda: FlowSamples(GptTokens(str(folder / GPT))),
            gather(corpus, scale.seconds),
            {"gather": 0.6, "oneflow": 6},
        ),
    ]


def _prepared(contenders: tuple[Contender, ...], prepare: Make) -> tuple[Contender, ...]:
    """The contenders, the first of which has the row's files made."""
    first, *rest = contenders

    @contextmanager
    def opened() -> Iterator[Measure]:
        prepare()
        with first.open() as measure:
            yield measure

    return (Contender(first.name, opened), *rest)
