"""The example trainings on one and on four ranks: the share of their steps that goes into data."""

from __future__ import annotations

from tools.benchmarks.deliveries import RANKS
from tools.benchmarks.rows import AtMost, Row, Scale
from tools.benchmarks.suites.delivery import make_digits, on_ranks_of
from tools.benchmarks.suites.text import write_corpus
from tools.benchmarks.training import DIGITS, GPT, VOCABULARY

_WORK = {DIGITS: "the digits ViT trains", GPT: "the GPT of configs/gpt_stdlib.py trains"}
_ON = {1: "1 rank", RANKS: "4 ranks, 2 x 2"}


def rows(scale: Scale) -> list[Row]:
    """The rows of the suite; what is read is made when it is needed, in `scale.folder`."""
    return [_row(scale, kind, ranks) for kind in _WORK for ranks in _ON]


def _row(scale: Scale, kind: str, ranks: int) -> Row:
    on_ranks = on_ranks_of(scale, make_digits if kind == DIGITS else _make_corpus, ranks)
    name = f"{kind}-{ranks}"
    contenders = tuple(on_ranks(name, what) for what in ("data", "step"))
    claims = (AtMost("data", 2, "%"), AtMost("step", None, "ms"))
    return Row(name, f"{_WORK[kind]}, {_ON[ranks]}", "as configured", contenders, claims)


def _make_corpus(scale: Scale) -> None:
    write_corpus(scale.folder / GPT, 10**5 if scale.quick else 10**6, VOCABULARY)
