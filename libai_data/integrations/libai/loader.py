"""Adapts a loader of this package to LiBai's trainer: checkpoints, resume, and evaluation without padding."""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Collection, Iterator, Mapping
from functools import wraps
from typing import Any, Callable

from libai_data.data.samplers.resuming import RESTART_DATA
from libai_data.delivery.to_global import compare_with_other_ranks
from libai_data.errors import CheckpointError, SchemaError
from libai_data.mesh.peers.liveness import watch_over_ranks
from libai_data.structures import Instance

logger = logging.getLogger(__name__)

STATE = "train_loader"
"""The entry of LiBai's checkpoints that stores the position in the data."""

_WRAPPED = "_of_libai_data"
"""Marks a function of LiBai that `take_part` has wrapped."""


class LiBaiLoader:
    """Adapts a loader of this package to LiBai's trainer.

    The builders of this module return such loaders. If you write your own `build_train_loader`, wrap its loader, such
    as a loader of `from_iterable`. A pass begins with the first `next`, because LiBai calls `iter` before it reads the
    checkpoint. The ranks compare their batches here, because LiBai makes each field global itself.

    Args:
        loader: a loader of `DataLoader`, `from_iterable` or a builder. This object has all attributes of `loader`.

    Attributes:
        repeats: when an epoch ends, a pass continues with the next one. So it is for the train loader of a trainer, of
            which LiBai takes only one pass.
    """

    repeats = False

    def __init__(self, loader: Any) -> None:
        take_part()
        self._loader = loader
        self._restored = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __bool__(self) -> bool:
        return True  # Without this, `bool(loader)` would be by its length, which may be unknown.

    def __iter__(self) -> Iterator[Instance]:
        return _Pass(self)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was used, as JSON values."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], override: Collection[str] = ()) -> None:
        """Continue at `state`. Iterators that LiBai already has continue there too.

        Args:
            state: result of `state_dict`.
            override: names of what may differ on purpose; see `OVERRIDES` of the samplers.

        Raises:
            CheckpointError: The state belongs to another dataset or stream.
        """
        self._loader.load_state_dict(state, **({"override": override} if override else {}))
        self._restored += 1

    def go_to(self, consumed_samples: int) -> None:
        """Continue after `consumed_samples` samples, for a checkpoint that has no position in the data.

        Raises:
            CheckpointError: The loader is not an endless stream of a dataset.
        """
        stream: Any = getattr(self._loader, "stream", None)
        if not hasattr(stream, "set_consumed_samples"):
            raise CheckpointError(
                f"the checkpoint has no position in the data, and a {type(self._loader).__name__} that is no endless "
                f"stream of a dataset cannot continue after {consumed_samples} samples; to restart its data: "
                f"train.resume_override=[{RESTART_DATA}]"
            )
        stream.set_consumed_samples(consumed_samples)
        self._restored += 1


class _Pass:
    """One iteration. It begins with the first batch, and begins again after the loader's position was changed."""

    def __init__(self, loader: LiBaiLoader) -> None:
        self._loader = loader
        self._batches: Iterator[Instance] | None = None
        self._restored = loader._restored

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Instance:
        if self._batches is None or self._restored != self._loader._restored:
            self._batches = iter(self._loader._loader)
            self._restored = self._loader._restored
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._loader.repeats:
                raise
            self._batches = iter(self._loader._loader)
            batch = next(self._batches)
        compare_with_other_ranks(batch)
        return batch


def take_part() -> None:
    """Make LiBai's trainer save, restore and evaluate loaders of this package; once per process. Collective.

    This function replaces three functions of LiBai, because LiBai has no other way to add objects to its checkpoints,
    to choose the evaluation, or to give a graph its inputs by their names. For other loaders, the first two work as
    before. From now on the ranks also watch each other, so that a rank that fails or dies ends the job.
    """
    from libai.engine import default
    from libai.models.utils import GraphBase

    watch_over_ranks()
    if not hasattr(default.inference_on_dataset, _WRAPPED):
        default.DefaultTrainer.resume_or_load = _with_data(default.DefaultTrainer.resume_or_load)
        default.inference_on_dataset = _each_sample_once(default.inference_on_dataset)
        setattr(default.inference_on_dataset, _WRAPPED, True)
        GraphBase.__call__ = _by_names(GraphBase.__call__)


def _with_data(resume_or_load: Callable[..., None]) -> Callable[..., None]:
    """LiBai's `resume_or_load`; the checkpointer then also saves and restores the train loader."""

    @wraps(resume_or_load)
    def with_data(self: Any, resume: bool = True) -> None:
        loader = self.train_loader
        if not isinstance(loader, LiBaiLoader):
            resume_or_load(self, resume)
            return
        from libai_data.engine.data_state import DataState

        loader.repeats = True
        data = DataState(loader, self.cfg.train.get("resume_override") or ())
        self.checkpointer.checkpointables[STATE] = data
        resume_or_load(self, resume)
        if not (resume and self.start_iter) or data.is_restored:
            return
        if data.may_be_absent:
            logger.warning("The train loader restarts its data: train.resume_override.")
        else:
            consumed = self.cfg.dataloader.consumed_samples
            logger.warning(
                "The checkpoint has no position in the data; continuing after the %d samples that %d steps of the "
                "present batch size used.",
                consumed,
                self.start_iter,
            )
            loader.go_to(consumed)

    return with_data


def _each_sample_once(inference_on_dataset: Callable[..., Any]) -> Callable[..., Any]:
    """LiBai's evaluation; for loaders of this package, this package's evaluation, which knows which rows are padding.

    LiBai's evaluation computes the number of rows from the dataset's length. With three or more data-parallel ranks, it
    pairs outputs of the last batch with wrong inputs.
    """

    @wraps(inference_on_dataset)
    def each_sample_once(
        model: Any, data_loader: Any, batch_size: int, eval_iter: int, get_batch: Any, *rest: Any
    ) -> Any:
        if not isinstance(data_loader, LiBaiLoader):
            return inference_on_dataset(model, data_loader, batch_size, eval_iter, get_batch, *rest)
        from libai_data.engine.evaluation import inference_on_dataset as own_inference

        # `rest` is (evaluator) in LiBai 0.1, and (input_placement_device, evaluator) in later versions.
        device = rest[0] if len(rest) > 1 else "cuda"
        return own_inference(model, data_loader, batch_size, eval_iter, get_batch, device, _own_evaluators(rest[-1]))

    return each_sample_once


def _by_names(call: Callable[..., Any]) -> Callable[..., Any]:
    """The `__call__` of LiBai's graphs, which OneFlow gives the inputs by their order: that of the first call."""

    @wraps(call)
    def called_by_names(self: Any, *args: Any, **inputs: Any) -> Any:
        names = vars(self).setdefault("_names_of_inputs", [*inputs])
        if sorted(names) != sorted(inputs):
            raise SchemaError(
                f"the inputs are {sorted(inputs)}, but the graph is compiled for {sorted(names)}. Let all datasets of "
                "training, or all of evaluation, have the same fields, or set graph.enabled=False"
            )
        return call(self, *args, **{name: inputs[name] for name in names})

    return called_by_names


def _own_evaluators(evaluator: Any) -> Any:
    """Converts LiBai's evaluators (one, a list, or None) to evaluators for this package's `inference_on_dataset`."""
    from libai_data.engine.evaluation import DatasetEvaluator

    if isinstance(evaluator, abc.MutableSequence):
        return [_own_evaluators(each) for each in evaluator]
    if evaluator is None or isinstance(evaluator, DatasetEvaluator):
        return evaluator
    own = DatasetEvaluator()
    for method in ("reset", "process", "evaluate"):
        setattr(own, method, getattr(evaluator, method))
    return own
