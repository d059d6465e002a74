"""The optimizer's state of each parameter, under the same name in eager and in graph mode.

In eager mode, the optimizer has the state: ``optimizer._state[parameter]["exp_avg"]``, ``optimizer._state["step"]``. In
graph mode, the compiled graph's `state_dict` has the state: "model.<parameter>-m" and "System-Train-TrainStep". A
checkpoint has the state as "<slot>/<parameter>", with eager mode's names of slots. So a checkpoint of one mode can be
resumed in the other mode.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from libai_data.engine.checkpoint.placement import fill, whole_on_rank0
from libai_data.engine.checkpoint.tensor_file import TensorFile
from libai_data.errors import CheckpointError
from libai_data.mesh.current import broadcast_py_object

logger = logging.getLogger(__name__)

# Names of slots in compiled graphs -> names in eager mode.
_EAGER_SLOT = {
    "m": "exp_avg",
    "v": "exp_avg_sq",
    "max_v": "max_exp_avg_sq",
    "momentum": "momentum_buf",
    "mean_square": "square_avg",
    "mean_gradient": "grad_avg",
}
_GRAPH_SLOT = {eager: graph for graph, eager in _EAGER_SLOT.items()}
_GRAPH_PREFIX = "model."
_TRAIN_STEP = "System-Train-TrainStep"
_SYSTEM = "graph/"


def collect(model: Any, optimizer: Any, graph: Any = None) -> tuple[int, dict[str, Any]]:
    """The number of updates made, and "<slot>/<parameter>" -> tensor, with equal names on all ranks."""
    return _collect_graph(graph) if graph is not None else _collect_eager(model, optimizer)


def restore(step: int, file: TensorFile, model: Any, optimizer: Any, graph: Any = None) -> None:
    """Restore the stored state into a new optimizer. Parameters are found by name, so groups and mesh may differ.

    Raises CheckpointError if the graph has run already, or the state does not fit the parameters.
    """
    import oneflow as flow

    parameters = dict(model.named_parameters())
    slots = [name for name in file.names() if not name.startswith(_SYSTEM)]
    for name in slots:
        _check(name, file, parameters)
    found: dict[str, Any] = {}
    for name in slots:
        with flow.no_grad():
            found[name] = flow.zeros_like(parameters[name.partition("/")[2]])
        fill(found[name], file, name)
    if graph is not None:
        _restore_graph(step, file, found, parameters, graph)
    else:
        _restore_eager(step, found, parameters, optimizer)


def forget_untrained(optimizer: Any) -> None:
    """Free the restored state of parameters that the optimizer does not train, and that no hook has added by now."""
    getattr(optimizer, "__dict__", {}).pop("add_param_group", None)


def _collect_eager(model: Any, optimizer: Any) -> tuple[int, dict[str, Any]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        for parameter in group.parameters:
            for slot, value in optimizer._state.get(parameter, {}).items():
                if getattr(value, "shape", None) != parameter.shape:
                    raise TypeError(
                        f"the optimizer ({type(optimizer).__name__}) has the state {slot!r} for the parameter "
                        f"'{names[parameter]}', which checkpoints cannot store: {value!r:.100}. They store tensors of "
                        f"the parameter's shape, {tuple(parameter.shape)}"
                    )
                found[f"{slot}/{names[parameter]}"] = value
    return int(optimizer._state["step"]), found


def _collect_graph(graph: Any) -> tuple[int, dict[str, Any]]:
    step, found = 0, {}
    for name, value in graph.state_dict().items():
        if isinstance(value, Mapping):
            continue
        if name == _TRAIN_STEP:
            step = _integer(value)
        elif name.startswith(_GRAPH_PREFIX):
            parameter, _, slot = name[len(_GRAPH_PREFIX) :].rpartition("-")
            found[f"{_EAGER_SLOT.get(slot, slot)}/{parameter}"] = value
        else:
            found[_SYSTEM + name] = value
    return step, found


def _integer(tensor: Any) -> int:
    """The number in a tensor of one item, on all ranks; of a local tensor, rank 0's number. Collective."""
    array = whole_on_rank0(tensor)
    return int(broadcast_py_object(None if array is None else int(array.ravel()[0])))


def _check(name: str, file: TensorFile, parameters: dict[str, Any]) -> None:
    _, _, parameter = name.partition("/")
    if parameter not in parameters:
        raise CheckpointError(f"{file.path} has optimizer state '{name}', but the model has no parameter '{parameter}'")
    shape = tuple(parameters[parameter].shape)
    if file.shape(name) != shape:
        raise CheckpointError(
            f"{file.path} has optimizer state '{name}' of shape {file.shape(name)}, but the parameter has shape {shape}"
        )


def _restore_eager(step: int, found: dict[str, Any], parameters: dict[str, Any], optimizer: Any) -> None:
    optimized = {parameter for group in optimizer.param_groups for parameter in group.parameters}
    forget_untrained(optimizer)  # that of an earlier checkpoint
    optimizer._state["step"] = step
    others: dict[Any, dict[str, Any]] = {}
    names = set()
    for name, state in found.items():
        slot, _, parameter = name.partition("/")
        if parameters[parameter] in optimized:
            optimizer._state.setdefault(parameters[parameter], {})[slot] = state
        else:
            others.setdefault(parameters[parameter], {})[slot] = state
            names.add(parameter)
    if not names:
        return
    logger.warning(
        "The optimizer does not train %s now, whose state the checkpoint has. If a hook had added the parameters in "
        "the training, let the hook add them again (optimizer.add_param_group) before the first step; then their state "
        "is restored.",
        ", ".join(sorted(names)),
    )

    def add_with_state(group: dict[str, Any]) -> None:
        type(optimizer).add_param_group(optimizer, group)
        for parameter in optimizer.param_groups[-1].parameters:
            optimizer._state[parameter].update(others.pop(parameter, {}))

    optimizer.add_param_group = add_with_state


def _restore_graph(step: int, file: TensorFile, found: dict[str, Any], parameters: dict[str, Any], graph: Any) -> None:
    if graph.is_compiled:
        raise CheckpointError("a graph's optimizer state can be loaded only before its first step")
    states: dict[str, Any] = {}
    for name, state in found.items():
        slot, _, parameter = name.partition("/")
        states[f"{_GRAPH_PREFIX}{parameter}-{_GRAPH_SLOT.get(slot, slot)}"] = state
    any_parameter = next(iter(parameters.values()))
    for name in file.names():
        if name.startswith(_SYSTEM):
            states[name[len(_SYSTEM) :]] = _broadcast(file.read(name), any_parameter)
    states[_TRAIN_STEP] = _broadcast(np.array([step], np.int64), any_parameter)
    graph.load_state_dict(states)


def _broadcast(array: np.ndarray, like: Any) -> Any:
    """A tensor with these contents on each rank of `like`."""
    import oneflow as flow

    if not like.is_global:
        return flow.from_numpy(array)
    sbp = [flow.sbp.broadcast] * len(like.sbp)
    whole = flow.empty(array.shape, dtype=flow.from_numpy(array).dtype, placement=like.placement, sbp=sbp)
    local = whole.to_local()
    if local.numel():
        local.copy_(flow.from_numpy(array))
    return whole
