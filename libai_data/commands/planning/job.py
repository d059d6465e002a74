"""The plan of a job: its fields, and what each read mode costs its nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libai_data.commands.inspection.field_parts import Part, part_of, whole_shape
from libai_data.delivery.read_plan import ReadPlan
from libai_data.delivery.traffic import FieldSize, NodeTraffic, node_traffic, times_read
from libai_data.loader.schema import Layout
from libai_data.mesh.global_tensor import split_dims
from libai_data.mesh.parallel_mesh import ParallelMesh

_WORTH_SHARING = 1.5
"""How many times a sample must be read over before one reader a node is recommended."""


@dataclass(frozen=True)
class PlannedField:
    """A field of a sample.

    Args:
        name: the field's.
        dtype: numpy's.
        sample_shape: without the batch dim.
        layout: of the field.
    """

    name: str
    dtype: np.dtype
    sample_shape: tuple[int, ...]
    layout: Layout

    @property
    def sample_bytes(self) -> int:
        """Of one sample, decoded."""
        return int(np.prod(self.sample_shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class JobPlan:
    """A job on a mesh.

    Args:
        mesh: of the job.
        micro_batch_size: rows of one batch of one data-parallel rank.
        fields: of a sample.
        reads_parts: the dataset can read parts of samples.
    """

    mesh: ParallelMesh
    micro_batch_size: int
    fields: tuple[PlannedField, ...]
    reads_parts: bool = False

    def sizes(self) -> list[FieldSize]:
        """The fields, as far as they cost something."""
        tensor = self.mesh.tensor_parallel_size
        return [
            FieldSize(
                field.name,
                field.sample_bytes,
                field.layout.placement_idx,
                tensor if self.reads_parts and split_dims(field.layout.sbp_list)[1] is not None else 1,
            )
            for field in self.fields
        ]

    def costs(self, readers: str) -> dict[NodeTraffic, list[int]]:
        """What a batch costs, in one read mode, with the nodes that it costs so much."""
        plan, sizes = ReadPlan(self.mesh, readers), self.sizes()
        nodes: dict[NodeTraffic, list[int]] = {}
        for node in range(self.mesh.num_nodes):
            nodes.setdefault(node_traffic(plan, node, sizes, self.micro_batch_size), []).append(node)
        return nodes

    def part_held(self, field: PlannedField, rank: int) -> Part | None:
        """What a rank holds of a field's global tensor; None where another stage holds it.

        Raises:
            SchemaError: The layout does not fit the mesh.
            MeshError: The mesh has no such layer.
        """
        shape = whole_shape(self.micro_batch_size, field.sample_shape, field.layout, self.mesh)
        return part_of(shape, field.layout, self.mesh, rank)

    def recommended(self) -> tuple[str, str]:
        """A read mode for data that every node can reach, and why."""
        own = ReadPlan(self.mesh, "every_rank")
        over = times_read(own) / times_read(ReadPlan(self.mesh, "node"))
        sizes = self.sizes()
        if any(size.read_parts > 1 for size in sizes):
            whole, parts = (
                sum(size.sample_bytes // (size.read_parts if cut else 1) for size in sizes) for cut in (0, 1)
            )
            return "every_rank", (
                f"the dataset reads parts of samples: a rank reads {parts:,} bytes of each sample instead of {whole:,}"
            )
        if over >= _WORTH_SHARING:
            return "node", f"with every_rank, the ranks of a node read and decode each sample {over:g} times"
        return "every_rank", "hardly a sample is read twice on a node, so that sharing it would gain nothing"
