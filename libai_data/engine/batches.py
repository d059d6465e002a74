"""Turn the batches of any loader into the keyword arguments of the model."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Callable

import numpy as np

from libai_data.data.nesting import is_texts, put_together, taken_apart
from libai_data.delivery.gather import digest_of, gather_words
from libai_data.errors import ConfigError, SchemaError
from libai_data.mesh.arrays import is_flow_tensor
from libai_data.mesh.current import get_data_parallel_rank, get_data_parallel_size
from libai_data.structures import BatchInfo, batch_info


class StepInputs:
    """The model's inputs for the micro-batches of a step; a loader that ends is started again."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.seconds = 0.0  # that `joined` has taken; the trainer resets it
        self.taken = 0  # batches that were read, or lost by an error; the trainer resets it after each step
        self.infos: list[BatchInfo | None] = []  # of the batches that `joined` has joined
        self.has_failed = False  # reading has raised an error, after which a pass with a state is of no use
        self._batches: Iterator[Any] | None = None
        self._is_first = True

    def next(self) -> Any:
        """The next batch."""
        if self._batches is None:
            # Not before the first step, because a checkpoint may restore the loader until then.
            self._batches = iter(self.loader)
        for _ in range(2):
            try:
                batch = next(self._batches)
            except StopIteration:
                self._batches = iter(self.loader)
            except BaseException:
                # Generators end after an error, and torch's loaders leave the batch out. `CountedLoader` is of these.
                self.taken += hasattr(self.loader, "counted")
                self.has_failed = True
                raise
            else:
                self.taken += 1
                return batch
        loader = getattr(self.loader, "counted", self.loader)
        raise ConfigError(
            f"the train loader ({type(loader).__name__}) yields no batch; is its dataset smaller than a batch, or an "
            "iterator that can be used only once?"
        )

    def restart(self) -> None:
        """Forget the running iteration, after the loader's state was changed."""
        self._batches, self.taken, self.has_failed = None, 0, False

    def joined(self, count: int, get_batch: Callable[..., dict[str, Any]], device: str) -> dict[str, Any]:
        """Make the inputs from `count` consecutive batches, joined along dim 0, and add the time to `seconds`."""
        start = time.perf_counter()
        batches = [self.next() for _ in range(count)]
        self.infos = [batch_info(batch) for batch in batches]
        mixup_func = getattr(self.loader, "mixup_func", None)
        inputs = join_inputs([call_get_batch(get_batch, batch, device, mixup_func) for batch in batches])
        is_first, self._is_first = self._is_first, False
        if is_first and batch_info(batches[0]) is None:
            refuse_copies(inputs, f"train loader ({type(getattr(self.loader, 'counted', self.loader)).__name__})")
        self.seconds += time.perf_counter() - start
        return inputs


def refuse_copies(inputs: Mapping[str, Any], loader: str) -> None:
    """Check that data-parallel ranks do not all have the same rows: each may read the whole of a user's own loader.

    Collective.

    Args:
        inputs: the model's inputs of a batch.
        loader: which loader they are of.

    Raises:
        ConfigError: All data-parallel ranks have the same rows; raised on all ranks.
    """
    if get_data_parallel_size() == 1:
        return
    import oneflow as flow

    leaves: dict[str, Any] = {}
    taken_apart(inputs, leaves)
    divided = [
        each.to_local().numpy()
        for each in leaves.values()
        if getattr(each, "is_global", False) and each.sbp[0] == flow.sbp.split(0)
    ]
    # If all rows of a batch are equal, as in a test of speed, they show nothing.
    shows = any(len(each) == 1 or (each != each[:1]).any() for each in divided)
    own = b"".join(each.tobytes() for each in divided) if shows else b""
    digests: dict[int, set[int]] = {}
    for data_rank, size, digest in gather_words(
        np.array([get_data_parallel_rank(), len(own), digest_of(own)])
    ).tolist():
        digests.setdefault(data_rank, set()).update([digest] if size else [])
    if digests[0] and all(each == digests[0] for each in digests.values()):
        raise ConfigError(
            f"all {len(digests)} data-parallel ranks got the same rows in the first batch of the {loader}. If each "
            f"rank reads the whole loader, each sample counts {len(digests)} times: divide the loader by "
            "libai_data.from_iterable, or give each rank its own samples"
        )


def call_get_batch(
    get_batch: Callable[..., dict[str, Any]], data: Any, device: str, mixup_func: Callable | None = None
) -> dict[str, Any]:
    """Call a `get_batch` with those of LiBai's arguments that it accepts.

    LiBai calls it with (data, input_placement_device, mixup_func), and documents (data, mixup_func=None) for overriding
    it.
    """
    optional = {"input_placement_device": device, "mixup_func": mixup_func}
    parameters = list(inspect.signature(get_batch).parameters.values())
    names = [parameter.name for parameter in parameters]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        inputs = get_batch(data, **optional)
    elif any(name in optional for name in names):
        inputs = get_batch(data, **{name: value for name, value in optional.items() if name in names})
    else:
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        required = [p for p in positional if p.default is p.empty]
        inputs = get_batch(data, *list(optional.values())[: max(len(required) - 1, 0)])
    if not isinstance(inputs, dict):
        raise SchemaError(
            f"get_batch returned a {type(inputs).__name__}; it must return a dict from the argument names of "
            "model.forward to tensors"
        )
    return inputs


def mixed_up(data: Any, mixup_func: Callable[..., Any] | None, device: str) -> Any:
    """Let a mixup function, if there is one, mix the images and labels of this rank's batch on `device`."""
    if mixup_func is not None:
        images, labels = data.get("images"), data.get("labels")
        images.tensor, labels.tensor = mixup_func(images.tensor.to(device), labels.tensor.to(device))
    return data


def join_inputs(inputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join model inputs along dim 0. Each rank joins its own rows: those of one input come before those of the next."""
    if len(inputs) == 1:
        return inputs[0]
    leaves: list[dict[str, Any]] = [{} for _ in inputs]
    skeleton, *_ = [taken_apart(each, own) for each, own in zip(inputs, leaves)]
    joined: dict[str, Any] = put_together(skeleton, lambda leaf: _join_leaves([own[leaf.path] for own in leaves]))
    return joined


def name_inputs(micro_batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One dict of the inputs of several micro-batches, with numbers in the names, for a graph's `build`."""
    return {f"{name}_{number}": value for number, each in enumerate(micro_batches) for name, value in each.items()}


def part_inputs(inputs: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Split one dict into the inputs of `count` micro-batches; the inverse of `name_inputs`."""
    names = [name[: -len("_0")] for name in inputs][: len(inputs) // count]
    return [{name: inputs[f"{name}_{number}"] for name in names} for number in range(count)]


def _join_leaves(parts: list[Any]) -> Any:
    import oneflow as flow

    first = parts[0]
    if is_texts(first):
        return [text for part in parts for text in part]
    if not is_flow_tensor(first):
        return first  # A graph refuses it.
    if not first.is_global:
        return flow.cat(parts, dim=0)
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    joined = flow.empty(shape, dtype=first.dtype, placement=first.placement, sbp=first.sbp)
    own = joined.to_local()
    if own.numel():
        own.copy_(flow.cat([part.to_local() for part in parts], dim=0))
    return joined
