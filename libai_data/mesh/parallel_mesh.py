"""`ParallelMesh`: the ranks of a job on the data, tensor and pipeline axes. A plain value; needs no OneFlow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libai_data.errors import ConfigError, MeshError, nearest
from libai_data.errors.argument_rules import Rule, check, one_of, or_none, whole

DEVICE_TYPE = one_of("cuda", "cpu")
_COUNT = whole(1)
_LAYER = Rule("an int", whole(-(2**31)).accepts)
SIZE_KEYS = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
DIST_KEYS = SIZE_KEYS + (
    "pipeline_num_layers",
    "custom_pipeline_stage_id",
    "auto_pipeline_stage_id",
    "actual_pipeline_stage_id",
    "num_nodes",
    "num_gpus_per_node",
    "device_type",
)


@dataclass(frozen=True)
class ParallelMesh:
    """The sizes of a job's axes, and the coordinates of one rank.

    Ranks are numbered with the pipeline axis outermost, then data, tensor innermost:
    `rank = (pipeline_rank * data_parallel_size + data_rank) * tensor_parallel_size + tensor_rank`.

    Args:
        data_parallel_size: ranks over which a global batch is split.
        tensor_parallel_size: ranks over which a layer is split.
        pipeline_parallel_size: stages over which the layers are spread.
        rank: this process, in `[0, world_size)`.
        num_nodes: machines, each with the same number of ranks.
        device_type: `"cuda"` or `"cpu"`.
        layer_stage_ids: the pipeline stage of each layer; empty means one layer per stage.

    Raises:
        MeshError: a size, the rank, the device type or a stage is out of its range.
    """

    data_parallel_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    rank: int = 0
    num_nodes: int = 1
    device_type: str = "cpu"
    layer_stage_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (*SIZE_KEYS, "num_nodes"):
            refuse(_COUNT, name, getattr(self, name))
        refuse(whole(0, self.world_size - 1), "rank", self.rank)
        if self.world_size % self.num_nodes:
            raise MeshError(
                f"{self.world_size} ranks do not divide over num_nodes={self.num_nodes}: "
                "start the same number on each node."
            )
        refuse(DEVICE_TYPE, "device_type", self.device_type)
        stages = tuple(self.layer_stage_ids) or tuple(range(self.pipeline_parallel_size))
        _check_stages("layer_stage_ids", stages, self.pipeline_parallel_size)
        object.__setattr__(self, "layer_stage_ids", stages)

    @property
    def sizes_in_words(self) -> str:
        """The sizes of the axes, for logs and pages."""
        return " x ".join(f"{name.partition('_')[0]} {getattr(self, name)}" for name in SIZE_KEYS)

    @property
    def in_words(self) -> str:
        """What must be equal on all ranks, for an error message."""
        sizes = ", ".join(f"{name.partition('_')[0]}={getattr(self, name)}" for name in SIZE_KEYS)
        return f"{sizes}, layers={len(self.layer_stage_ids)}, {self.device_type}"

    @classmethod
    def from_config(
        cls,
        dist_cfg: Mapping[str, Any],
        rank: int = 0,
        world_size: int = 1,
        num_nodes: int = 1,
        gpu_available: bool = False,
    ) -> ParallelMesh:
        """Builds the mesh of `train.dist` from the ranks that were started.

        A size that is None or absent is derived from the other two and the world size. If several sizes are missing,
        the pipeline size and then the tensor size become 1, until one is left to derive.

        Args:
            dist_cfg: the mapping `train.dist`.
            rank: this process.
            world_size: processes that were started.
            num_nodes: machines they run on.
            gpu_available: False turns `device_type="cuda"` into `"cpu"`.

        Raises:
            ConfigError: a key is unknown, or its value is impossible.
            MeshError: the sizes do not multiply to the world size.
        """
        for key in dist_cfg:
            if key not in DIST_KEYS:
                raise ConfigError(f"train.dist.{key} is not a known key.{nearest(str(key), DIST_KEYS)}")
        rules = {**dict.fromkeys(SIZE_KEYS, or_none(_COUNT)), "device_type": or_none(DEVICE_TYPE)}
        for key, rule in rules.items():
            check({f"train.dist.{key}": rule}, **{f"train.dist.{key}": dist_cfg.get(key)})
        data, tensor, pipeline = _sizes(dist_cfg, world_size)
        return cls(
            data_parallel_size=data,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            rank=rank,
            num_nodes=num_nodes,
            device_type="cuda" if gpu_available and dist_cfg.get("device_type") != "cpu" else "cpu",
            layer_stage_ids=_configured_stages(dist_cfg, pipeline),
        )

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.data_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each machine."""
        return self.world_size // self.num_nodes

    @property
    def parts_of_data(self) -> float:
        """Into how many parts the nodes divide the rows of a batch; nodes of other stages have the same rows."""
        ranks, tensor = self.ranks_per_node, self.tensor_parallel_size
        # The most data ranks on one node: a node may begin or end in the middle of a tensor-parallel group.
        of_node = -(-ranks // tensor) + (max(ranks, tensor) % min(ranks, tensor) > 0)
        return max(1.0, self.data_parallel_size / of_node)

    @property
    def data_parallel_rank(self) -> int:
        """Which shard of a global batch this rank works on."""
        return self.shard_of(self.rank)

    @property
    def tensor_parallel_rank(self) -> int:
        """Which shard of a layer this rank has."""
        return self.rank % self.tensor_parallel_size

    @property
    def pipeline_parallel_rank(self) -> int:
        """Which stage this rank belongs to."""
        return self.rank // (self.tensor_parallel_size * self.data_parallel_size)

    @property
    def parallel_hierarchy(self) -> tuple[int, int] | None:
        """Shape `(data, tensor)` of a stage's ranks; None if one of the axes has size 1, so a stage is a flat list."""
        if self.data_parallel_size > 1 and self.tensor_parallel_size > 1:
            return self.data_parallel_size, self.tensor_parallel_size
        return None

    def shard_of(self, rank: int) -> int:
        """Which shard of a global batch a rank works on: its coordinate on the data axis."""
        return rank // self.tensor_parallel_size % self.data_parallel_size

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """The `data_parallel_size * tensor_parallel_size` consecutive ranks of a pipeline stage, ascending.

        Raises:
            MeshError: there is no such stage.
        """
        if not 0 <= stage < self.pipeline_parallel_size:
            raise MeshError(f"There is no stage {stage}: the mesh has {self.pipeline_parallel_size} pipeline stage(s).")
        size = self.data_parallel_size * self.tensor_parallel_size
        return tuple(range(stage * size, (stage + 1) * size))

    def layer_stage(self, layer_idx: int) -> int:
        """Pipeline stage of a layer. A negative index counts from the end. With one stage, any index is valid.

        Raises:
            MeshError: there is no such layer, or the index is no int.
        """
        refuse(_LAYER, "the layer (placement_idx of a field)", layer_idx)
        if self.pipeline_parallel_size == 1:
            return 0
        count = len(self.layer_stage_ids)
        if not -count <= layer_idx < count:
            raise MeshError(
                f"There is no layer {layer_idx}: train.dist.pipeline_num_layers gives stages to {count} layers."
            )
        return self.layer_stage_ids[layer_idx]

    def layer_ranks(self, layer_idx: int) -> tuple[int, ...]:
        """Ranks of the stage that has a layer, ascending; see `layer_stage`."""
        return self.ranks_of_stage(self.layer_stage(layer_idx))


def spread_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The stage of each layer: consecutive layers in nearly equal parts, the larger parts on the later stages.

    The first stages store the activations of the most micro-batches, so they get fewer layers.
    """
    base, remainder = divmod(num_layers, num_stages)
    stages: list[int] = []
    for stage in range(num_stages):
        stages += [stage] * (base + (stage >= num_stages - remainder))
    return tuple(stages)


def refuse(rule: Rule, name: str, value: object) -> None:
    """Raise a MeshError if a value breaks its rule."""
    if not rule.accepts(value):
        raise MeshError(rule.problem(name, value))


def _check_stages(name: str, stages: tuple[int, ...], num_stages: int) -> None:
    is_stage = whole(0, num_stages - 1).accepts
    for layer, stage in enumerate(stages):
        if not is_stage(stage):
            raise MeshError(
                f"{name}[{layer}] is {stage!r}, but with pipeline_parallel_size={num_stages} "
                f"the stages are 0..{num_stages - 1}."
            )
        if layer and stage < stages[layer - 1]:
            # A graph runs stages in order: fields enter at the first layer's stage and leave at the last layer's.
            raise MeshError(
                f"{name}[{layer}] is {stage} after {stages[layer - 1]}: stages must not decrease from layer to layer."
            )
    unused = sorted(set(range(num_stages)) - set(stages))
    if unused:
        raise MeshError(
            f"{name}={list(stages)} gives no layer to stage(s) {unused}: each of the {num_stages} needs one."
        )


def _sizes(dist_cfg: Mapping[str, Any], world_size: int) -> tuple[int, int, int]:
    sizes = {key: dist_cfg.get(key) for key in SIZE_KEYS}
    for key in ("pipeline_parallel_size", "tensor_parallel_size"):
        if sizes[key] is None and list(sizes.values()).count(None) > 1:
            sizes[key] = 1
    product = 1
    for size in sizes.values():
        product *= size or 1
    asked = ", ".join(f"{key}={size}" for key, size in sizes.items() if size is not None)
    missing = [key for key, size in sizes.items() if size is None]
    if missing:
        if world_size % product:
            raise MeshError(
                f"train.dist has {asked}, and {product} does not divide the {world_size} ranks that were started."
            )
        sizes[missing[0]] = world_size // product
    elif product != world_size:
        raise MeshError(
            f"train.dist has {asked}, which is {product} ranks, but {world_size} were started: "
            "change a size, set one of them to null to derive it, or start another number of ranks."
        )
    data, tensor, pipeline = (int(sizes[key] or 1) for key in SIZE_KEYS)
    return data, tensor, pipeline


def _configured_stages(dist_cfg: Mapping[str, Any], num_stages: int) -> tuple[int, ...]:
    if num_stages == 1:
        return ()  # the same config is valid without a pipeline: all layers are on the only stage
    num_layers = dist_cfg.get("pipeline_num_layers")
    if num_layers is None:
        raise ConfigError(
            f"train.dist.pipeline_num_layers is missing: with pipeline_parallel_size={num_stages} "
            "it must be the number of the model's layers."
        )
    if not whole(num_stages).accepts(num_layers):
        raise ConfigError(
            f"train.dist.pipeline_num_layers is {num_layers!r}; it must be an integer of at least "
            f"pipeline_parallel_size={num_stages}, so that each stage gets a layer."
        )
    custom = dist_cfg.get("custom_pipeline_stage_id")
    if custom is None:
        return spread_layers(num_layers, num_stages)
    key = "train.dist.custom_pipeline_stage_id"
    try:
        stages = tuple(custom)
    except TypeError:
        raise ConfigError(f"{key} is {custom!r}; it must be a list with the stage of each layer.") from None
    if len(stages) != num_layers:
        raise ConfigError(f"{key} has {len(stages)} entries, but train.dist.pipeline_num_layers is {num_layers}.")
    _check_stages(key, stages, num_stages)
    return stages
