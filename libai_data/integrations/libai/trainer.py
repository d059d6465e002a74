"""What LiBai's trainer does differently with our loaders: where its data resume, and what its evaluation counts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Callable

from libai_data.data.samplers.resuming import RESTART_DATA

logger = logging.getLogger(__name__)

STATE = "train_loader"
"""The entry of LiBai's checkpoints that holds the place in the data."""

_BOUND_ANEW = "_of_libai_data"
"""Marks a function of LiBai that `take_part` has wrapped."""


class DataPipeline:
    """Goes before LiBai's trainer among the bases of yours; its config may then name LiBai's builders.

    ::

        class Trainer(DataPipeline, DefaultTrainer): ...

    The builders that the config names are replaced by ours of the same name, whose further arguments (`readers`,
    `layouts`, `prefetch`, `on_error`, ...) the config may set. Datasets are made by the ranks that read them, and by no
    others. A builder that is none of LiBai's is called as it is.
    """

    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        """LiBai's, with our builder."""
        with _our_builders([cfg.dataloader.train]):
            return super().build_train_loader(cfg, tokenizer)  # type: ignore[misc]

    @classmethod
    def build_test_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        """LiBai's, with our builders."""
        with _our_builders(list(cfg.dataloader.get("test") or [])):
            return super().build_test_loader(cfg, tokenizer)  # type: ignore[misc]


@contextmanager
def _our_builders(sections: list[Any]) -> Iterator[None]:
    from libai_data.integrations.libai.builders import BUILDERS, TARGET, defer, is_of_libai, undefer

    changed = []
    for section in sections:
        target = section.get(TARGET)
        name = target.rpartition(".")[2] if isinstance(target, str) else getattr(target, "__name__", "")
        if is_of_libai(target, BUILDERS):
            section[TARGET] = f"libai_data.integrations.libai.{name}"
        elif getattr(target, "__module__", str(target)).partition(".")[0] != "libai_data":
            logger.warning("%s is none of LiBai's builders, and is called as it is; its data do not resume.", target)
            continue
        changed.append(section)
    names = ("dataset", "sampler", "train_sampler", "test_sampler")
    for section in changed:
        for name in names:
            defer(section, name)
    try:
        yield
    finally:
        for section in changed:
            for name in names:
                undefer(section, name)


def take_part() -> None:
    """Let LiBai's trainer save and restore our loaders, and evaluate on them; once per process. Collective.

    Its checkpointer is given its objects, and its evaluation function looked up, inside of LiBai; that is why two names
    of LiBai are bound anew here. With loaders that are not ours, both do what they did. From now on the ranks also
    watch over each other, so that one that fails or dies ends the job.
    """
    from libai.engine import default

    from libai_data.mesh.peers.liveness import watch_over_ranks

    watch_over_ranks()
    if not hasattr(default.inference_on_dataset, _BOUND_ANEW):
        default.DefaultTrainer.resume_or_load = _with_data(default.DefaultTrainer.resume_or_load)
        default.inference_on_dataset = _each_sample_once(default.inference_on_dataset)
        setattr(default.inference_on_dataset, _BOUND_ANEW, True)


def _with_data(resume_or_load: Callable[..., None]) -> Callable[..., None]:
    """LiBai's `resume_or_load`, with the train loader among what its checkpointer saves and restores."""

    @wraps(resume_or_load)
    def with_data(self: Any, resume: bool = True) -> None:
        from libai_data.integrations.libai.loader import LiBaiLoader

        loader = self.train_loader
        if not isinstance(loader, LiBaiLoader):
            resume_or_load(self, resume)
            return
        place = _Place(loader, self.cfg.train.get("resume_override") or ())
        self.checkpointer.checkpointables[STATE] = place
        resume_or_load(self, resume)
        if resume and self.start_iter and place.begins_anew:
            logger.warning("The train loader begins its data anew: train.resume_override.")
        elif resume and self.start_iter and not place.restored:
            consumed = self.cfg.dataloader.consumed_samples
            logger.warning(
                "The checkpoint holds no place in the data; going on after the %d samples that %d steps of the present "
                "batch size have taken.",
                consumed,
                self.start_iter,
            )
            loader.go_to(consumed)

    return with_data


class _Place:
    """What LiBai's checkpointer keeps of a train loader.

    Args:
        loader: a `LiBaiLoader`.
        override: `train.resume_override`: what may differ from the checkpoint on purpose.
    """

    def __init__(self, loader: Any, override: Any) -> None:
        self._loader = loader
        self._override = tuple(override)
        self.begins_anew = RESTART_DATA in self._override
        self.restored = False

    def state_dict(self) -> dict[str, Any]:
        """The loader's state."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the loader, unless its data are to begin anew."""
        if self.begins_anew:
            return
        self._loader.load_state_dict(state, self._override)
        self.restored = True


def _each_sample_once(inference_on_dataset: Callable[..., Any]) -> Callable[..., Any]:
    """LiBai's evaluation, but ours for our loaders, whose batches say which of their rows are padding.

    LiBai's counts rows from the length of the dataset, and with three data-parallel ranks or more moves the outputs of
    the last batch away from their inputs.
    """

    @wraps(inference_on_dataset)
    def each_sample_once(
        model: Any, data_loader: Any, batch_size: int, eval_iter: int, get_batch: Any, *rest: Any
    ) -> Any:
        from libai_data.integrations.libai.loader import LiBaiLoader

        if not isinstance(data_loader, LiBaiLoader):
            return inference_on_dataset(model, data_loader, batch_size, eval_iter, get_batch, *rest)
        from libai_data.engine.evaluation import inference_on_dataset as own_inference
        from libai_data.integrations.libai.evaluation import own_evaluators

        # (evaluator) in LiBai 0.1, (input_placement_device, evaluator) later.
        device = rest[0] if len(rest) > 1 else "cuda"
        return own_inference(model, data_loader, batch_size, eval_iter, get_batch, device, own_evaluators(rest[-1]))

    return each_sample_once
