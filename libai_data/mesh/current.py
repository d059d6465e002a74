"""The mesh of this job, and its placements, SBP signatures and collectives under LiBai's names."""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import MutableMapping
from functools import lru_cache
from typing import Any

from libai_data.errors import ConfigError, MeshError
from libai_data.errors.argument_rules import whole
from libai_data.mesh.parallel_mesh import DEVICE_TYPE, ParallelMesh, refuse

# Functions import `mesh.peers` when they need it, because a worker process that only reads samples does not.
logger = logging.getLogger(__name__)

_MESH: ParallelMesh | None = None
_ONE_RANK = ParallelMesh(1, 1, 1)


def set_mesh(mesh: ParallelMesh | None) -> None:
    """Makes `mesh` the mesh of this job; None removes the mesh.

    A job sets its mesh once, by `setup_dist_util`. This function replaces the mesh, as tests need.

    Raises:
        MeshError: The mesh has all ranks of the job, but its `rank` is not this process.
    """
    global _MESH
    size, rank = os.environ.get("WORLD_SIZE"), os.environ.get("RANK")
    if mesh is not None and size == str(mesh.world_size) != "1" and rank not in (None, str(mesh.rank)):
        raise MeshError(f"the mesh has rank={mesh.rank}, but this is rank {rank}; init() finds the rank by itself")
    _MESH = mesh


def get_mesh() -> ParallelMesh:
    """Returns the mesh of this job.

    If no mesh was set, this is LiBai's mesh (`libai.utils.distributed`). If LiBai has no mesh either, all started ranks
    are on the data axis.
    """
    if _MESH is not None:
        return _MESH
    if "oneflow" not in sys.modules and (os.environ.get("WORLD_SIZE") or "1") == "1":
        # Without several ranks the mesh is known, so a process that only reads data need not import OneFlow.
        return _ONE_RANK
    return mesh_of_libai() or _mesh_of_all_ranks()


def mesh_of_libai() -> ParallelMesh | None:
    """Returns the mesh that LiBai has set up in this process, if any."""
    dist_util = getattr(sys.modules.get("libai.utils.distributed"), "_DIST_UTIL", None)
    return None if dist_util is None else _mesh_of_libai(dist_util)


def init(
    data: int | None = None,
    tensor: int | None = None,
    pipeline: int | None = None,
    *,
    layers: int | None = None,
    device: str = "cuda",
) -> ParallelMesh:
    """Begins a job without the trainer: builds the mesh, connects the ranks. From then on, all ranks end if one fails.

    Collective. Call it first: loaders are built for the current mesh.

    Args:
        data: ranks that a global batch is split over; by default the number of ranks divided by the other two sizes.
        tensor: ranks that a layer is split over; by default 1.
        pipeline: stages that the layers are spread over; by default 1.
        layers: layers of the model, for a pipeline.
        device: `"cuda"` or `"cpu"`; `"cpu"` if there is no GPU.

    Raises:
        ConfigError: a size is impossible.
        MeshError: the sizes do not fit the ranks that were started, or this job already has another mesh.
        PeerError: some ranks do not start.
    """
    is_new = _MESH is None
    sizes = {"data_parallel_size": data, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    try:
        mesh = setup_dist_util({**sizes, "pipeline_num_layers": layers, "device_type": device})
    except (ConfigError, MeshError) as error:
        raise type(error)(f"init({data=}, {tensor=}, {pipeline=}, {layers=}): {error}") from None
    from libai_data.mesh.peers.liveness import watch_over_ranks

    watch_over_ranks(f"init({mesh.in_words})" if is_new else "")
    return mesh


def setup_dist_util(dist_cfg: MutableMapping[str, Any]) -> ParallelMesh:
    """Builds the mesh from `train.dist` and the ranks that were started, and makes it the mesh of this job.

    The sizes in use are written back into `dist_cfg`, so a config that is saved afterwards contains them.

    Raises:
        ConfigError: a key is unknown, a value is impossible, or the job was started with another `num_nodes` or
            `num_gpus_per_node`.
        MeshError: the sizes do not fit the ranks, or this job already has another mesh.
    """
    mesh = _mesh_from_environment(dist_cfg)
    if _MESH is not None and mesh != _MESH:
        raise MeshError(f"This job already has the mesh {_MESH}; it cannot change to {mesh}.")
    if _MESH is None and dist_cfg.get("device_type", "cuda") == "cuda" and mesh.device_type == "cpu":
        logger.info("There is no GPU: the job runs on the CPU (train.dist.device_type).")
    for key, actual in (("num_nodes", mesh.num_nodes), ("num_gpus_per_node", mesh.ranks_per_node)):
        if dist_cfg.get(key) not in (None, actual):
            raise ConfigError(
                f"train.dist.{key} is {dist_cfg[key]!r}, but the job was started with {actual}. Start it on the nodes "
                "that the config names, or remove the key: the launcher decides it"
            )
    _write_back(dist_cfg, mesh)
    set_mesh(mesh)
    _give_to_libai(dist_cfg, mesh)
    return mesh


def get_layer_placement(layer_idx: int, device_type: str | None = None) -> Any:
    """Placement of a layer: the ranks of its pipeline stage.

    Args:
        layer_idx: the layer; a negative one counts from the end.
        device_type: `"cuda"` or `"cpu"`; the mesh's own by default, and `"cpu"` if there is no GPU.

    Returns:
        A `oneflow.placement` of shape `(data, tensor)` if both axes are larger than 1, otherwise of shape `(ranks,)`.

    Raises:
        MeshError: The mesh has no such layer, or `device_type` is not allowed.
    """
    import oneflow as flow

    mesh = get_mesh()
    device_type = device_type or mesh.device_type
    refuse(DEVICE_TYPE, "device_type", device_type)
    if device_type == "cuda" and not flow.cuda.is_available():
        device_type = "cpu"
    ranks = list(mesh.layer_ranks(layer_idx))
    if mesh.parallel_hierarchy is None:
        return flow.placement(device_type, ranks)
    width = mesh.tensor_parallel_size
    return flow.placement(device_type, [ranks[i : i + width] for i in range(0, len(ranks), width)])


def get_nd_sbp(sbp_list: list[Any]) -> list[Any]:
    """Removes from a signature over the (data, tensor) axes the entries of axes that have size 1 in the mesh.

    Args:
        sbp_list: two `oneflow.sbp`, for the data and the tensor axis.

    Returns:
        The entries of the axes with more than one rank; broadcast if there is no such axis.

    Raises:
        ValueError: `sbp_list` is not a list of two.
        TypeError: an entry is not a `oneflow.sbp`.
    """
    import oneflow as flow

    if not isinstance(sbp_list, (list, tuple)) or len(sbp_list) != 2:
        raise ValueError(f"sbp_list is {sbp_list!r}; it must have two entries, for the data and the tensor axis.")
    for sbp in sbp_list:
        if not isinstance(sbp, flow.sbp.sbp):
            raise TypeError(f"sbp_list has {sbp!r}; each must be a oneflow.sbp, such as oneflow.sbp.split(0).")
    mesh = get_mesh()
    if mesh.parallel_hierarchy is not None:
        return list(sbp_list)
    if mesh.data_parallel_size > 1:
        return [sbp_list[0]]
    if mesh.tensor_parallel_size > 1:
        return [sbp_list[1]]
    return [flow.sbp.broadcast]


def get_hidden_sbp() -> list[Any]:
    """SBP of hidden states: rows are split over the data axis, and broadcast over the tensor axis."""
    import oneflow as flow

    return get_nd_sbp([flow.sbp.split(0), flow.sbp.broadcast])


def get_data_parallel_rank() -> int:
    """The shard of a global batch that this rank gets."""
    return get_mesh().data_parallel_rank


def get_data_parallel_size() -> int:
    """Number of shards of a global batch."""
    return get_mesh().data_parallel_size


def get_tensor_parallel_size() -> int:
    """Number of shards of a layer."""
    return get_mesh().tensor_parallel_size


def get_pipeline_parallel_size() -> int:
    """Number of pipeline stages."""
    return get_mesh().pipeline_parallel_size


def get_rank() -> int:
    """The number of this process in the job."""
    return get_mesh().rank


def get_local_rank() -> int:
    """The number of this process on its node."""
    mesh = get_mesh()
    return mesh.rank % mesh.ranks_per_node


def get_world_size() -> int:
    """The number of processes of the job."""
    return get_mesh().world_size


def get_num_nodes() -> int:
    """The number of machines of the job."""
    return get_mesh().num_nodes


def is_main_process() -> bool:
    """Whether this is rank 0, which logs and writes."""
    return get_rank() == 0


def is_last_process() -> bool:
    """Whether this is the last rank, which has the last stage's results."""
    mesh = get_mesh()
    return mesh.rank == mesh.world_size - 1


def synchronize() -> None:
    """Waits until every rank has called this function."""
    if get_world_size() > 1:
        import oneflow as flow

        from libai_data.mesh.peers.liveness import in_collective

        with in_collective("synchronize"):
            flow.comm.barrier()


def say_farewell() -> None:
    """Tells the other ranks that this rank ends. Only a process that ends by `os._exit` must call this itself."""
    from libai_data.mesh.peers import liveness

    liveness.say_farewell()


def broadcast_py_object(obj: Any, src: int = 0) -> Any:
    """Sends a picklable object from one rank to all. Collective: each rank must call it.

    Args:
        obj: what rank `src` sends; ignored on the others.
        src: the sending rank; a MeshError if the job has no such rank.

    Returns:
        The object of rank `src`; the sender gets a copy too, so that no rank shares state with its own argument.
    """
    refuse(whole(0, get_world_size() - 1), "src", src)
    sent = pickle.dumps(obj) if get_rank() == src else None
    if get_world_size() > 1:
        import oneflow as flow

        from libai_data.mesh.peers.liveness import in_collective

        with in_collective(f"broadcast_py_object of rank {src}"):
            sent = flow._oneflow_internal.cpu_broadcast(sent, src)
    return pickle.loads(sent or b"")


def check_can_be_sent(obj: Any) -> None:
    """Raises the exception with which `broadcast_py_object` would fail to send an object."""
    pickle.loads(pickle.dumps(obj))


def tensor_to_rank0(tensor: Any, device: str = "cpu", to_local: bool = False) -> Any:
    """Brings a whole global tensor to rank 0. Collective: each rank must call it.

    Args:
        tensor: a global tensor of any placement and SBP; a local one is returned as it is.
        device: where rank 0 keeps it.
        to_local: return the local tensor; on the other ranks it is empty.

    Returns:
        The tensor, global with its placement on rank 0 alone, or local.
    """
    import oneflow as flow

    if not tensor.is_global:
        return tensor
    dims = len(tensor.placement.ranks.shape)
    # OneFlow moves a tensor between placements of equal depth only: rank 0 of a 2-D placement is [[0]].
    placement = flow.placement(device, [[0]] if dims == 2 else [0])
    tensor = moved(tensor, placement, [flow.sbp.broadcast] * dims)
    return tensor.to_local() if to_local else tensor


def moved(tensor: Any, placement: Any, sbp: list[Any]) -> Any:
    """A global tensor with another placement and SBP. Collective: each rank must call it."""
    import oneflow as flow

    # OneFlow 0.9 cannot send these between CPUs; it raises an error, or aborts.
    sent = {flow.uint8: flow.int8, flow.float16: flow.float32, flow.bfloat16: flow.float32}.get(tensor.dtype)
    if sent is None or tensor.placement.type != "cpu":
        return tensor.to_global(placement=placement, sbp=sbp)
    return tensor.to(sent).to_global(placement=placement, sbp=sbp).to(tensor.dtype)


def convert_to_distributed_default_setting(module_or_tensor: Any) -> Any:
    """Makes local tensors global (broadcast, on the first stage), and moves global tensors to the mesh's device.

    Args:
        module_or_tensor: a `oneflow.nn.Module`, changed in place and returned, or a tensor.
    """
    import oneflow as flow

    if isinstance(module_or_tensor, flow.nn.Module):
        return module_or_tensor._apply(convert_to_distributed_default_setting)
    tensor = module_or_tensor
    if tensor.is_global:
        return tensor.to_global(placement=flow.placement(get_mesh().device_type, tensor.placement.ranks))
    return tensor.to_global(sbp=get_nd_sbp([flow.sbp.broadcast, flow.sbp.broadcast]), placement=get_layer_placement(0))


# Cached, because each batch needs the mesh, and the ranks of a job do not change.
@lru_cache(maxsize=1)
def _mesh_of_all_ranks() -> ParallelMesh:
    return _mesh_from_environment({})


# Cached by object: LiBai makes a new object when it sets up another mesh.
@lru_cache(maxsize=1)
def _mesh_of_libai(dist_util: Any) -> ParallelMesh:
    import oneflow as flow

    stages = dist_util.pipeline_parallel_size
    device_type = getattr(dist_util, "device_type", "cuda")
    return ParallelMesh(
        data_parallel_size=dist_util.data_parallel_size,
        tensor_parallel_size=dist_util.tensor_parallel_size,
        pipeline_parallel_size=stages,
        rank=flow.env.get_rank(),
        num_nodes=dist_util.num_nodes,
        device_type="cpu" if device_type == "cuda" and not flow.cuda.is_available() else device_type,
        # Without a pipeline, LiBai lists 10,000 layers.
        layer_stage_ids=tuple(dist_util._layer_stage_ids) if stages > 1 else (),
    )


def _mesh_from_environment(dist_cfg: MutableMapping[str, Any]) -> ParallelMesh:
    import oneflow as flow

    return ParallelMesh.from_config(
        dist_cfg,
        rank=flow.env.get_rank(),
        world_size=flow.env.get_world_size(),
        num_nodes=flow.env.get_node_size(),
        gpu_available=flow.cuda.is_available(),
    )


def _give_to_libai(dist_cfg: MutableMapping[str, Any], mesh: ParallelMesh) -> None:
    """Sets the mesh of LiBai, if LiBai is imported: its layers would otherwise put all ranks on the data axis."""
    libai = sys.modules.get("libai.utils.distributed")
    if libai is None:
        return
    from omegaconf import DictConfig

    stages = mesh.pipeline_parallel_size
    libai.setup_dist_util(DictConfig({**dist_cfg, "pipeline_num_layers": stages if stages > 1 else 10_000}))
    if stages > 1:  # Versions of LiBai spread layers in different ways.
        libai._DIST_UTIL._layer_stage_ids = list(mesh.layer_stage_ids)
        libai._DIST_UTIL._layer_ranks = [list(mesh.layer_ranks(layer)) for layer in range(len(mesh.layer_stage_ids))]


def _write_back(dist_cfg: MutableMapping[str, Any], mesh: ParallelMesh) -> None:
    # Imported here, because processes that only read data also load this module, and must start fast.
    from omegaconf import DictConfig, open_dict

    actual = {
        "data_parallel_size": mesh.data_parallel_size,
        "tensor_parallel_size": mesh.tensor_parallel_size,
        "pipeline_parallel_size": mesh.pipeline_parallel_size,
        "num_nodes": mesh.num_nodes,
        "num_gpus_per_node": mesh.ranks_per_node,
    }
    if mesh.pipeline_parallel_size > 1:
        actual["actual_pipeline_stage_id"] = list(mesh.layer_stage_ids)  # type: ignore[assignment]
    if isinstance(dist_cfg, DictConfig):
        with open_dict(dist_cfg):
            dist_cfg.update(actual)
    else:
        dist_cfg.update(actual)
