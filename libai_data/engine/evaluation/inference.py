"""Running a model over a test loader."""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, Callable, Union

import numpy as np

from libai_data.data.attributes import attribute_of
from libai_data.data.nesting import is_texts, taken_apart, with_leaves
from libai_data.data.samplers.sampler import StreamSampler
from libai_data.delivery.gather import gather_words
from libai_data.delivery.shared_loader import SharedLoader
from libai_data.engine.batches import call_get_batch, refuse_copies
from libai_data.engine.evaluation.evaluator import (
    DatasetEvaluator,
    DatasetEvaluators,
    check_evaluator,
    evaluated,
    prepared,
)
from libai_data.engine.running_statistics import average_statistics
from libai_data.errors import ConfigError, ContractError, SchemaError
from libai_data.mesh.arrays import is_flow_tensor
from libai_data.mesh.current import (
    broadcast_py_object,
    get_data_parallel_size,
    get_world_size,
    is_main_process,
    synchronize,
    tensor_to_rank0,
)
from libai_data.structures import BatchInfo, batch_info

logger = logging.getLogger(__name__)

_ALL = 100_000
"""The default of `train.evaluation.eval_iter`. This number, or more, means all."""

Evaluators = Union[DatasetEvaluator, Sequence[DatasetEvaluator], None]


def inference_on_dataset(
    model: Any,
    data_loader: Iterable[Any],
    batch_size: int,
    eval_iter: float,
    get_batch: Callable[..., dict[str, Any]],
    input_placement_device: str,
    evaluator: Evaluators,
    check_inputs: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Run a model over a loader's batches, each sample once, and evaluate. Collective; LiBai's arguments.

    Args:
        model: a `oneflow.nn.Module` or `nn.Graph` that returns a dict of tensors. It runs in eval mode.
        data_loader: any iterable of batches. All ranks must get the same number of batches. Before the evaluator gets
            a tensor with a row for each sample, the rows that `BatchInfo` marks as padding are dropped.
        batch_size: samples of a global batch.
        eval_iter: limits the evaluation to the samples of this number of batches of one data-parallel rank, so that the
            samples do not depend on the number of ranks; for batches without a `BatchInfo`, the number of batches.
        get_batch: makes the model's arguments from a batch.
        input_placement_device: "cuda" or "cpu", for `get_batch`.
        evaluator: one, several, or None to only run the model.
        check_inputs: called once with the inputs of the first batch.

    Returns:
        The results of rank 0, on every rank.

    Raises:
        ConfigError: The evaluator is not a DatasetEvaluator, nor a list of these; or the loader yields no
            batch, or has no end, or yields the same rows on all data-parallel ranks.
        ContractError: The loaders of some ranks have ended, and those of other ranks have not.
        SchemaError: The model returned no dict, or local tensors instead of global ones; or a batch with padding has no
            input with the number of rows of the batch.
    """
    import oneflow as flow

    if evaluator is None or isinstance(evaluator, Sequence):
        evaluator = DatasetEvaluators(evaluator or [])
    check_evaluator(evaluator)
    evaluator.reset()
    endless = attribute_of(data_loader, "endless")
    if endless is True and eval_iter >= _ALL:
        raise ConfigError(
            f"the test loader ({type(data_loader).__name__}) is an endless stream, which an evaluation would never "
            "finish; use a loader that ends, as build_image_test_loader makes it, or ends='pad'"
        )
    if endless is False:
        # Each evaluation uses the same samples and draws, after any number of evaluations, also in another process.
        data_loader.set_epoch(0)  # type: ignore[attr-defined]
    if isinstance(module_of(model), flow.nn.Module):
        average_statistics(module_of(model))
    start = time.perf_counter()
    samples, inputs_without, outputs_without = 0, _WithoutPadding(), _WithoutPadding()
    step, has_its_rows = -1, True
    with inference_context(model), flow.no_grad():
        most = math.inf if eval_iter >= _ALL else math.ceil(eval_iter)
        most_samples = most * (batch_size // get_data_parallel_size())
        for step, batch in enumerate(_in_lockstep(data_loader)):
            info = batch_info(batch)
            inputs = call_get_batch(get_batch, batch, input_placement_device)
            if check_inputs is not None and step == 0:
                check_inputs(inputs)
            if step == 0 and info is None:
                refuse_copies(inputs, f"test loader ({type(data_loader).__name__})")
            outputs = model(**inputs)
            if not isinstance(outputs, Mapping):
                raise SchemaError(f"the model returned a {type(outputs).__name__}; it must return a dict of tensors")
            rows, valid, has_its_rows = _rows(inputs, info, has_its_rows)
            kept = rows if valid is None else valid
            if info is not None:
                kept = int(min(kept, most_samples - samples))
            wanted = getattr(evaluator, "input_fields", None)
            seen = {name: value for name, value in inputs.items() if wanted is None or name in wanted}
            chosen = prepared(evaluator, inputs, outputs)
            valid_inputs = _on_rank0(seen, partial(inputs_without, rows=rows, valid=valid, kept=kept))
            valid_outputs = _on_rank0(chosen, partial(outputs_without, rows=rows, valid=valid, kept=kept))
            samples += kept
            if is_main_process():
                evaluator.process(valid_inputs, valid_outputs)
            # Not after the next batch was read, which a stream would lose.
            if samples >= most_samples or (step + 1 >= most and info is None):
                break
    if step < 0:
        raise ConfigError(
            f"the test loader ({type(data_loader).__name__}) yields no batch; is its dataset empty, or is it an "
            "iterator that can be used only once?"
        )
    synchronize()
    seconds = time.perf_counter() - start
    logger.info(
        f"Evaluated {samples} samples in batches of {batch_size}, in {seconds:.2f} s "
        f"({samples / max(seconds, 1e-9):.1f} samples/s)."
    )
    return broadcast_py_object(evaluated(evaluator))


def module_of(model: Any) -> Any:
    """The module in a graph; any other model itself."""
    import oneflow as flow

    return model.model.to(flow.nn.Module) if isinstance(model, flow.nn.Graph) else model


@contextmanager
def inference_context(model: Any) -> Iterator[None]:
    """Put a module, or the module in a graph, into eval mode in the block; other callables are not changed."""
    import oneflow as flow

    module = module_of(model)
    if not isinstance(module, flow.nn.Module):
        yield
        return
    was_training = module.training
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)
        for each, mode in modes:  # A part may have had another mode, such as a frozen BatchNorm.
            each.training = mode


def _in_lockstep(data_loader: Iterable[Any]) -> Iterator[Any]:
    """The batches; all ranks raise ContractError if the loaders of some ranks end before those of other ranks.

    With this package's samplers, all ranks end together. Else they exchange before each batch whether they have one.
    """
    ours = isinstance(data_loader, SharedLoader) or isinstance(getattr(data_loader, "stream", None), StreamSampler)
    if get_world_size() == 1 or ours:
        yield from data_loader
        return
    batches, end = iter(data_loader), object()
    for step in count():
        batch = next(batches, end)
        have = gather_words(np.array([batch is not end]))[:, 0].astype(bool)
        if not have.all() and have.any():
            raise ContractError(
                f"the test loaders of ranks {np.flatnonzero(~have).tolist()} have ended after {step} batches, those of "
                f"ranks {np.flatnonzero(have).tolist()} have not; give all ranks the same number of batches, as "
                "SingleRoundSampler does"
            )
        if batch is end:
            return
        yield batch


def _rows(inputs: dict[str, Any], info: BatchInfo | None, had_its_rows: bool) -> tuple[int, int | None, bool]:
    """Rows of the global batch, how many of them count (None: do not cut), and whether an input has as many rows.

    Not every input has the batch's rows: all samples may share a mask. So the loader's number is used, unless no input
    has this number of rows, as with a collator that leaves samples out. Then equal numbers in a later batch are chance.
    """
    leaves: dict[str, Any] = {}
    taken_apart(inputs, leaves)
    shapes = {name: tuple(value.shape) for name, value in leaves.items() if getattr(value, "ndim", 0) > 0}
    if not shapes:
        raise SchemaError(f"get_batch returned {sorted(inputs.keys())}, none of which has a batch dim")
    found = Counter(shape[0] for shape in shapes.values())
    # The best guess if the loader does not know the number of rows; the guess is only logged.
    frequent = max(found, key=lambda rows: (found[rows], rows))
    if info is None:
        return frequent, None, had_its_rows
    has_its_rows = info.size in found
    if info.valid < info.size and not (has_its_rows and had_its_rows):
        raise SchemaError(
            f"{info.valid} of the batch's {info.size} rows count, the others are padding, but none of the inputs has "
            f"{info.size} rows{' in an earlier batch' * has_its_rows}: {shapes}; let get_batch keep the rows, so that "
            "padding can be dropped"
        )
    if not has_its_rows:
        return frequent, None, False
    return info.size, info.valid, had_its_rows


class _WithoutPadding:
    """Cuts the padding off tensors with a row for each sample, and does not change tensors that all samples share.

    A table that all samples share may have as many rows as a padded batch. Then an earlier batch shows that the table
    is shared: it has another number of rows than that batch, or the same contents as there, while its last rows do not
    repeat the last sample, as padding does. Without an earlier batch, a warning names the table.
    """

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._shared: set[str] = set()
        self._warned: set[str] = set()

    def __call__(self, name: str, tensor: Any, rows: int, valid: int | None, kept: int) -> Any:
        """The first `kept` rows of a local tensor; those after `valid` are padding (None: there is no padding)."""
        if tensor.ndim == 0 or tensor.shape[0] != rows:
            self._shared.add(name)
            return tensor
        if name in self._shared or kept == rows:
            self._first.setdefault(name, _checksum(tensor))
            return tensor
        if valid in (None, rows) or not _ends_alike(tensor, valid):
            if self._first.get(name) == _checksum(tensor):
                self._shared.add(name)
                return tensor
            if name not in self._warned and valid not in (None, rows):
                self._warned.add(name)
                logger.warning(
                    f"'{name}' has as many rows as the batch ({rows}), of which {valid} count, but its last rows do "
                    f"not repeat the last sample, as padding does. They are left out. If all samples share '{name}', "
                    "give it another first dim, such as [1, ...]."
                )
        return tensor[:kept]


def _checksum(tensor: Any) -> int:
    return zlib.crc32(tensor.numpy().tobytes())


def _ends_alike(tensor: Any, valid: int) -> bool:
    """Whether all rows after the last one that counts repeat that row."""
    array = tensor.numpy()
    return bool(np.allclose(array[valid:], array[valid - 1], rtol=1e-3, atol=1e-5, equal_nan=True))


def _on_rank0(tensors: Mapping[str, Any], without_padding: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Bring tensors, also nested ones, to rank 0, without their padding.

    Strings are left out, because each rank has only its own strings. So is None.
    """

    def brought(name: str, tensor: Any) -> Any:
        if tensor is None or is_texts(tensor):
            return None
        if not is_flow_tensor(tensor):
            raise SchemaError(
                f"'{name}' is a {type(tensor).__name__}, and no tensor of OneFlow; leave it out by input_fields or "
                "prepare of the evaluator"
            )
        if get_world_size() > 1 and not tensor.is_global:
            raise SchemaError(
                f"'{name}' is a local tensor, so the parts of the other ranks would be lost; evaluate global tensors "
                "(to_global makes them of a batch)"
            )
        local = tensor_to_rank0(tensor, device="cpu", to_local=True)
        return without_padding(name, local) if is_main_process() else None

    whole = {name: with_leaves(name, value, brought) for name, value in tensors.items()}
    return {name: value for name, value in whole.items() if value is not None} if is_main_process() else {}
