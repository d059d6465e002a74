"""Compare how well orders shuffle data in shards, and what they keep open: `python tools/shuffle_quality.py`.

Where two samples that lie side by side in their files come in the stream says how well an order shuffles. The orders of
MosaicML Streaming stand beside those of this package if it is installed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from libai_data.data.samplers import LaneOrder, Order
from tools.benchmarks.chart import drawing, save

_QUANTILES = (0.01, 0.1, 0.5, 0.9)
_MOSAIC = ("py1e", "py1br")
_FULL, _PEER = "full shuffle", "MosaicML Streaming"


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
    places, shards, neighbours = _neighbours(stream, lengths)
    batches = places // batch_size
    together = np.mean(batches[neighbours + 1] == batches[neighbours]) / (batch_size / count)
    whole = shards[stream][: count // batch_size * batch_size].reshape(-1, batch_size)
    starts = np.cumsum(lengths) - lengths
    changes = np.zeros(count + 1, dtype=np.int64)
    np.add.at(changes, np.minimum.reduceat(places, starts), 1)
    np.add.at(changes, np.maximum.reduceat(places, starts) + 1, -1)
    return Quality(
        tuple(np.quantile(distances_of(stream, lengths), _QUANTILES).tolist()),
        float(together),
        float(np.mean([len(np.unique(batch)) for batch in whole[:: max(1, len(whole) // 200)]])),
        int(np.cumsum(changes).max()),
    )


def distances_of(stream: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """How far apart stored neighbours come in the stream, as shares of the epoch: float64 [pairs]."""
    places, _, neighbours = _neighbours(stream, lengths)
    distances: np.ndarray = np.abs(places[neighbours + 1] - places[neighbours]) / len(stream)
    return distances


def _neighbours(stream: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The place and the shard of each sample, and the samples whose next one is in the same shard."""
    places = np.empty(len(stream), dtype=np.int64)
    places[stream] = np.arange(len(stream))
    shards = np.repeat(np.arange(len(lengths)), lengths)
    return places, shards, np.flatnonzero(shards[1:] == shards[:-1])


def plot(distances: Mapping[str, np.ndarray], path: Path) -> None:
    """Draw which share of the stored neighbours comes within each distance, one line an order."""
    pyplot = drawing()
    figure, panel = pyplot.subplots(figsize=(7, 3.6))
    shares = np.linspace(0.002, 1, 250)
    for name, found in distances.items():
        style = "--" if name.startswith(_PEER) else "-"
        colour = "black" if name == _FULL else None
        panel.plot(np.quantile(found, shares), shares, style, color=colour, label=name)
    panel.set(xscale="log", xlabel="distance, as a share of the epoch", ylabel="share of the neighbours within it")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8)
    save(figure, path)


def streams(
    lengths: np.ndarray, lanes: Sequence[int], blocks: Sequence[int], seed: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and indices of one epoch of each order."""
    places = np.arange(int(lengths.sum()))
    yield _FULL, Order(len(places), seed).locate(places)[1]
    for count in lanes:
        for block in blocks:
            order = LaneOrder(len(places), seed, lanes=count, block=block, lengths=lengths)
            yield f"lanes={count}, block={block}", order.locate(places)[1]
    try:
        mosaic = importlib.import_module("streaming.base.shuffle")
    except ImportError:
        return
    for name in _MOSAIC:
        yield f"{_PEER}, {name}", mosaic.get_shuffle(name, lengths, 1, seed, 0, 1 << 18)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=1000, help="of a shard, on the average; from half to 1.5 times")
    parser.add_argument("--lanes", type=int, nargs="+", default=[64])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="also draw the distances into this file; needs matplotlib")
    asked = parser.parse_args(argv)
    drawn = np.random.default_rng(asked.seed)
    lengths = drawn.integers(-(-asked.samples // 2), asked.samples * 3 // 2 + 1, asked.shards)
    print("| order | distance 1 % | 10 % | median | 90 % | in one batch | shards in a batch | shards in use |")
    print("|---|---|---|---|---|---|---|---|")
    distances_by_name = {}
    for name, stream in streams(lengths, asked.lanes, asked.blocks, asked.seed):
        if asked.plot:
            distances_by_name[name] = distances_of(stream, lengths)
        found = quality_of(stream, lengths, asked.batch_size)
        columns = " | ".join(f"{distance:.4f}" for distance in found.distances)
        print(f"| {name} | {columns} | {found.together:.1f} x | {found.shards:.0f} | {found.live} |", flush=True)
    if asked.plot:
        plot(distances_by_name, asked.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
