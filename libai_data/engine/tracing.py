"""What the compilation of a graph loses of `forward`, whose Python code runs only once: errors and warnings."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import oneflow as flow
from oneflow import nn
from oneflow.autograd import autograd_mode
from oneflow.framework.c_api_util import GetCurrentJob

from libai_data.data.random.generator_states import watched
from libai_data.errors import ConfigError

logger = logging.getLogger(__name__)


@contextmanager
def checking_what_is_lost(graph: Any) -> Iterator[None]:
    """Check the block, which traces `graph.model` for training.

    Raises ConfigError if `forward` changes a buffer. The log warns of other attributes that `forward` assigns, of
    `no_grad`, and of random numbers.
    """
    before = _attributes_of(graph.model)
    with _warning_of_no_grad(), warning_of_draws():
        yield
    _check_keeps_nothing(graph.model.to(nn.Module), _attributes_of(graph.model) - before)
    changed = _changed_in_place(graph)
    if changed:
        raise ConfigError(
            f"forward changes {', '.join(changed)} in place, but graph mode does not keep changes of buffers. Set "
            "graph.enabled=False"
        )


@contextmanager
def warning_of_draws() -> Iterator[None]:
    """Warn in the log if the block draws from the generator of Python, numpy or torch: a graph keeps its numbers."""
    generators = watched()
    before = generators.marks()
    yield
    moved = zip(generators.generators, generators.moved(before, generators.marks()))
    names = [generator.name for generator, has_moved in moved if has_moved]
    if names:
        logger.warning(
            "forward draws random numbers from %s, but graph mode runs the Python code of forward only once, so each "
            "step gets the same numbers. Draw by OneFlow's functions, such as flow.rand, or set graph.enabled=False.",
            " and ".join(names),
        )


@contextmanager
def _warning_of_no_grad() -> Iterator[None]:
    """Warn in the log if the block switches gradients off: the autodiff of a compiled graph does not see this."""
    mode, entered = autograd_mode.AutoGradMode, [True]

    def noting(enabled: bool) -> Any:
        entered.append(enabled)
        return mode(enabled)

    autograd_mode.AutoGradMode = noting
    try:
        yield
    finally:
        autograd_mode.AutoGradMode = mode
    if not all(entered):
        logger.warning(
            "forward uses no_grad, but graph mode computes gradients there too. Call detach() of the tensors that need "
            "no gradient, or set graph.enabled=False."
        )


def _attributes_of(model: Any, name: str = "model") -> set[str]:
    """Names of the attributes that a graph's proxies of modules have of their own."""
    own = {f"{name}.{attribute}" for attribute in vars(model)}
    return own.union(*(_attributes_of(each, f"{name}.{child}") for child, each in model._modules.items()))


def _check_keeps_nothing(model: Any, assigned: set[str]) -> None:
    """Check what `forward` has assigned: only the compilation sees it, and the model itself does not.

    Raises ConfigError if it is a buffer. Of other attributes, which may be caches, the log warns.
    """
    buffers = {name for name, _ in model.named_buffers("model")}
    for name in sorted(assigned, key=lambda name: (name not in buffers, name)):
        what = f"forward assigns {name}, but graph mode runs the Python code of forward only once, to compile it"
        if name in buffers:
            raise ConfigError(f"{what}, so the buffer would not change. Set graph.enabled=False")
        logger.warning("%s. If later steps need the new value, set graph.enabled=False.", what)


def _changed_in_place(graph: Any) -> list[str]:
    """Names of the buffers that the traced operations change in place.

    OneFlow shows a change only in a later operation, which reads the result instead of the buffer. So such an operation
    is added for each buffer from which another tensor of its shape is computed.
    """
    # The running statistics of a normalization change in another way, and its count of batches has no effect.
    norms = {
        name for name, part in graph.model.to(nn.Module).named_modules(prefix="model") if hasattr(part, "running_mean")
    }
    builders = [buffer.lazy_origin_builder() for buffer in graph.model.buffers()]
    builders = [builder for builder in builders if builder.name.rpartition(".")[0] not in norms]
    if not builders:
        return []  # The job of a large model takes seconds to read.
    job = GetCurrentJob()
    shapes = {name: list(blob.shape.dim) for name, blob in job.helper.lbn2logical_blob_desc.items()}
    computed: dict[str, list[Any]] = {}  # name of a tensor -> shapes of tensors that are computed from it
    for op in job.net.op:
        found = [shapes.get(name) for each in op.user_conf.output.values() for name in each.s]
        for name in _inputs_of(op):
            computed.setdefault(name, []).extend(found)
    builders = [each for each in builders if shapes.get(f"{each.name}/out") in computed.get(f"{each.name}/out", ())]
    for builder in builders:
        flow._C.identity(builder.result)
    added = GetCurrentJob().net.op[len(job.net.op) :]
    return [builder.name for builder, op in zip(builders, added) if f"{builder.name}/out" not in _inputs_of(op)]


def _inputs_of(op: Any) -> list[str]:
    return [name for each in op.user_conf.input.values() for name in each.s]
