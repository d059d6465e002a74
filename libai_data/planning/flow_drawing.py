"""A drawing of what flows where in each read mode: from storage through readers and memory to the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from libai_data.global_batch.plan import READERS, ReadPlan
from libai_data.global_batch.traffic import NodeTraffic, node_traffic
from libai_data.in_words import bytes_in_words, numbers_in_words
from libai_data.inspection.drawing import FAINT, INK, LINE, Drawing, colour_of_shard
from libai_data.planning.job import JobPlan

_NODES_SHOWN, _RANKS_SHOWN = 2, 4
_RANK, _BOX = 104, 30
_GAP, _BETWEEN_NODES = 12, 110
_LEFT = 20
_STORAGE, _READER, _MEMORY, _RANKS, _FOOT = 36, 98, 160, 222, 276
_PANEL = 316
_NETWORK = "#b83232"

_NAMES = {
    "data_parallel": "data_parallel: every rank reads its own part",
    "node": "node: one reader a node, memory that its ranks share",
    "rank0": "rank0: rank 0 reads for all, and sends each other node its parts",
}


def flow_drawing(job: JobPlan) -> Drawing:
    """Draw the first nodes of a job, in each read mode.

    Args:
        job: the plan.
    """
    nodes, ranks = min(job.mesh.num_nodes, _NODES_SHOWN), min(job.mesh.ranks_per_node, _RANKS_SHOWN)
    width = 2 * _LEFT + nodes * _width_of_node(ranks) + (nodes - 1) * _BETWEEN_NODES
    drawing = Drawing(max(width, 560), len(READERS) * _PANEL, "What flows where in each read mode")
    drawing.rect(0, 0, drawing.width, drawing.height, "#ffffff")
    for number, readers in enumerate(READERS):
        _Panel(drawing, job, readers, number * _PANEL, nodes, ranks).draw()
    return drawing


def _width_of_node(ranks: int) -> int:
    return ranks * _RANK + (ranks + 1) * _GAP


class _Panel:
    """One read mode.

    Args:
        drawing: to draw on.
        job: the plan.
        readers: the mode.
        top: upper edge, pixels.
        nodes: to show.
        ranks: of each to show.
    """

    def __init__(self, drawing: Drawing, job: JobPlan, readers: str, top: int, nodes: int, ranks: int) -> None:
        self._drawing, self._job, self._top = drawing, job, top
        self._plan = ReadPlan(job.mesh, readers)
        self._nodes, self._ranks = nodes, ranks
        self._width = _width_of_node(ranks)

    def draw(self) -> None:
        """Draw it."""
        drawing, top = self._drawing, self._top
        drawing.text(_LEFT, top + 22, _NAMES[self._plan.readers], 15)
        reading = 1 if self._plan.readers == "rank0" else self._nodes
        across = reading * self._width + (reading - 1) * _BETWEEN_NODES
        self._box(_LEFT, _STORAGE, across, "storage of the dataset", "#f0f4f8")
        for node in range(self._nodes):
            self._node(node, _LEFT + node * (self._width + _BETWEEN_NODES))

    def _node(self, node: int, x: int) -> None:
        drawing, plan = self._drawing, self._plan
        cost = node_traffic(plan, node, self._job.sizes(), self._job.micro_batch_size)
        drawing.rect(x, self._top + _READER - 12, self._width, _FOOT - _READER + 30, "", LINE)
        ranks = list(plan.ranks_of(node))[: self._ranks]
        alone = plan.readers == "data_parallel"
        columns = [self._column(x, place) for place in range(len(ranks))]
        spans = columns if alone else [(x + _GAP, self._width - 2 * _GAP)]
        for number, (left, width) in enumerate(spans):
            reading = plan.shards_read_by(ranks[number])
            if reading:
                self._arrow(left + width / 2, _STORAGE + _BOX, _READER)
                self._box(left, _READER, width, f"reads {self._parts(reading)}", "#fffaf0")
                self._arrow(left + width / 2, _READER + _BOX, _MEMORY)
            held = reading if alone else plan.shards_in_memory_of(node)
            self._box(left, _MEMORY, width, f"{'' if alone else 'shared '}memory: {self._parts(held)}", "#edf7f0")
        for rank, (left, width) in zip(ranks, columns):
            self._arrow(left + width / 2, _MEMORY + _BOX, _RANKS)
            self._box(left, _RANKS, width, f"rank {rank}: part {plan.shard_of(rank)}", "#ffffff")
            drawing.rect(left, self._top + _RANKS, width, 4, colour_of_shard(plan.shard_of(rank)))
        if cost.bytes_received and node > 0:
            end, y = x + _GAP, self._top + _MEMORY + _BOX / 2
            drawing.arrow(end - _BETWEEN_NODES - 2 * _GAP, y, end, y, _NETWORK)
            middle = x - _BETWEEN_NODES / 2
            drawing.text(middle, y - 10, "network", 11, _NETWORK, "middle")
            drawing.text(middle, y + 20, bytes_in_words(cost.bytes_received), 11, _NETWORK, "middle")
        drawing.text(x + _GAP, self._top + _FOOT + 6, f"node {node}: {_in_words(cost)}", 12, FAINT, room=self._width)

    def _column(self, x: int, place: int) -> tuple[float, float]:
        return x + _GAP + place * (_RANK + _GAP), _RANK

    def _box(self, x: float, y: float, width: float, words: str, fill: str) -> None:
        self._drawing.rect(x, self._top + y, width, _BOX, fill, LINE)
        self._drawing.text(x + width / 2, self._top + y + 20, words, 12, INK, "middle", room=width - 4)

    def _arrow(self, x: float, start: float, end: float) -> None:
        self._drawing.arrow(x, self._top + start, x, self._top + end, FAINT)

    @staticmethod
    def _parts(shards: Sequence[int]) -> str:
        return f"part{'s' if len(shards) > 1 else ''} {numbers_in_words(shards)}"


def _in_words(cost: NodeTraffic) -> str:
    words: list[str] = []
    if cost.samples_read:
        words.append(f"{cost.samples_read:,} samples read, {bytes_in_words(cost.bytes_read)} decoded a batch")
    if cost.bytes_sent:
        words.append(f"{bytes_in_words(cost.bytes_sent)} sent")
    return ", ".join(words) or "reads nothing"
