"""Compare how well orders shuffle data in shards, and what they keep open: `python tools/shuffle_quality.py`.

Where two samples that lie side by side in their files come in the stream says how well an order shuffles. The orders of
MosaicML Streaming stand beside those of this package if it is installed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from libai_data.data.samplers import LaneOrder, Order

_QUANTILES = (0.01, 0.1, 0.5, 0.9)
_MOSAIC = ("py1e", "py1br")


class Quality(NamedTuple):
    """How well an order shuffles.

    Args:
        distances: of stored neighbours in the stream, as shares of the epoch: the quantiles 1, 10, 50 and 90 %.
        together: neighbours that come in the same batch, times as many as in a full shuffle.
        shards: different shards in a batch, on the average.
        live: shards that are in use at once, at most: between their first sample and their last one.
    """

    distances: tuple[float, ...]
    together: float
    shards: float
    live: int


def quality_of(stream: np.ndarray, lengths: np.ndarray, batch_size: int) -> Quality:
    """Measure one epoch.

    Args:
        stream: int64 [samples], the index at each place.
        lengths: int64 [shards].
        batch_size: samples of a batch.
    """
    count = len(stream)
    places = np.empty(count, dtype=np.int64)
    places[stream] = np.arange(count)
    shards = np.repeat(np.arange(len(lengths)), lengths)
    neighbours = np.flatnonzero(shards[1:] == shards[:-1])
    distances = np.abs(places[neighbours + 1] - places[neighbours])
    batches = places // batch_size
    together = np.mean(batches[neighbours + 1] == batches[neighbours]) / (batch_size / count)
    whole = shards[stream][: count // batch_size * batch_size].reshape(-1, batch_size)
    starts = np.cumsum(lengths) - lengths
    changes = np.zeros(count + 1, dtype=np.int64)
    np.add.at(changes, np.minimum.reduceat(places, starts), 1)
    np.add.at(changes, np.maximum.reduceat(places, starts) + 1, -1)
    return Quality(
        tuple(np.quantile(distances / count, _QUANTILES).tolist()),
        float(together),
        float(np.mean([len(np.unique(batch)) for batch in whole[:: max(1, len(whole) // 200)]])),
        int(np.cumsum(changes).max()),
    )


def streams(
    lengths: np.ndarray, lanes: Sequence[int], blocks: Sequence[int], seed: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and indices of one epoch of each order."""
    places = np.arange(int(lengths.sum()))
    yield "full shuffle", Order(len(places), seed).locate(places)[1]
    for count in lanes:
        for block in blocks:
            order = LaneOrder(len(places), seed, lanes=count, block=block, lengths=lengths)
            yield f"lanes={count}, block={block}", order.locate(places)[1]
    try:
        mosaic = importlib.import_module("streaming.base.shuffle")
    except ImportError:
        return
    for name in _MOSAIC:
        yield f"Streaming, {name}", mosaic.get_shuffle(name, lengths, 1, seed, 0, 1 << 18)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=1000, help="of a shard, on the average; from half to 1.5 times")
    parser.add_argument("--lanes", type=int, nargs="+", default=[64])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    drawn = np.random.default_rng(asked.seed)
    lengths = drawn.integers(-(-asked.samples // 2), asked.samples * 3 // 2 + 1, asked.shards)
    print("| order | distance 1 % | 10 % | median | 90 % | in one batch | shards in a batch | shards in use |")
    print("|---|---|---|---|---|---|---|---|")
    for name, stream in streams(lengths, asked.lanes, asked.blocks, asked.seed):
        found = quality_of(stream, lengths, asked.batch_size)
        distances = " | ".join(f"{distance:.4f}" for distance in found.distances)
        print(f"| {name} | {distances} | {found.together:.1f} x | {found.shards:.0f} | {found.live} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
