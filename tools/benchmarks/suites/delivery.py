"""Delivery: how long 4 ranks on one node wait for a batch, beside what OneFlow and LiBai's guide offer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Callable

from tools.benchmarks.deliveries import CHECK_EVERY, RANKS
from tools.benchmarks.photographs import write_photographs
from tools.benchmarks.ranks import Ranks
from tools.benchmarks.rows import AtLeast, AtMost, Contender, Measure, Row, Scale, Unavailable
from tools.benchmarks.samples import JPEG as PICTURES
from tools.benchmarks.training import DIGITS
from tools.prepare_digits import write_digits

RANK0 = "rank 0 reads for all: 16 x float32[3,224,224] and labels"
JPEG = "JPEGs of 500 x 375 decoded and delivered"
CHECKS = f"a check every {CHECK_EVERY} batches, as a share of the digits ViT's steps"

OnRanks = Callable[[str, str], Contender]


def rows(scale: Scale) -> list[Row]:
    """The rows of the suite; what is read from disk is made when it is needed, in `scale.folder`."""
    return [
        _row(scale, "tokens", "to_global: 4 x int64[32,1024] a rank, data 4", "to_global", 20),
        _row(scale, "images", "to_global: float32[32,3,224,224] a rank, 2 x 2", "to_global", 2.5),
        _row(scale, "rank0-4x1", f"{RANK0}, data 4", "guide", 8),
        _row(scale, "rank0-2x2", f"{RANK0}, 2 x 2", "guide", 8),
        _jpeg_row(scale, "jpeg-1x4", f"{JPEG}, tensor 4", 3.5),
        _jpeg_row(scale, "jpeg-2x2", f"{JPEG}, 2 x 2", 1.8),
        _checks_row(scale),
    ]


def _row(scale: Scale, name: str, work: str, peer: str, floor: float) -> Row:
    on_ranks = on_ranks_of(scale)
    contenders = (on_ranks(name, peer), on_ranks(name, "libai_data"))
    return Row(name, work, "0", contenders, (AtLeast("libai_data", peer, floor),))


def _jpeg_row(scale: Scale, name: str, work: str, floor: float) -> Row:
    on_ranks = on_ranks_of(scale, _make_pictures)
    contenders = (on_ranks(name, "every_rank"), on_ranks(name, "node"))
    return Row(name, work, "4", contenders, (AtLeast("node", "every_rank", floor),))


def _checks_row(scale: Scale) -> Row:
    on_ranks = on_ranks_of(scale, make_digits)
    contenders = tuple(on_ranks("checks", name) for name in ("tokens", "images"))
    return Row("checks", CHECKS, "0", contenders, tuple(AtMost(each.name, 1, "%") for each in contenders))


def on_ranks_of(scale: Scale, prepare: Callable[[Scale], None] = lambda scale: None, ranks: int = RANKS) -> OnRanks:
    """Makes contenders that are measured on the same ranks, which are launched for the first of them.

    Args:
        scale: how much is measured.
        prepare: makes what they read.
        ranks: how many.
    """
    shared = Ranks(ranks)

    def contender(row: str, name: str) -> Contender:
        @contextmanager
        def opened() -> Iterator[Measure]:
            prepare(scale)
            with shared as launched:
                launched.tell(f"{row}/{name}", replace(scale, folder=scale.folder.resolve()))
                yield lambda: launched.tell(f"{row}/{name}")

        return Contender(name, opened)

    return contender


def _make_pictures(scale: Scale) -> None:
    root = scale.folder / PICTURES
    if not root.exists():
        write_photographs(root, 64 if scale.quick else 512)


def make_digits(scale: Scale) -> None:
    try:
        write_digits(scale.folder / DIGITS)
    except ModuleNotFoundError as error:
        raise Unavailable("scikit-learn is not installed") from error
