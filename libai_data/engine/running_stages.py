"""How a trainer uses a data module: for its loaders, batches, evaluations and predictions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

from libai_data.config import instantiate, try_get_key
from libai_data.config.signatures import target_of
from libai_data.engine.batches import mixed_up
from libai_data.engine.built_parts import built_by
from libai_data.engine.datamodule.data_stages import DataStages
from libai_data.engine.evaluation.inference import inference_on_dataset
from libai_data.engine.evaluation.predictions import Predictions
from libai_data.engine.step_plan import step_plan
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import check, one_of
from libai_data.mesh.current import get_data_parallel_size

GetBatch = Callable[..., dict[str, Any]]


def stages_of(cfg: Any, datamodule: Any = None) -> DataStages | None:
    """The stages of a data module, by default `cfg.datamodule`, with the batch sizes and the model of a config.

    None if there is no data module; ConfigError if `cfg` has both `datamodule` and `dataloader`.
    """
    if datamodule is None and try_get_key(cfg, "datamodule") is not None:
        for key in ("dataloader.train", "dataloader.test"):
            if try_get_key(cfg, key) is not None:
                raise ConfigError(f"the config has both {key} and datamodule, which replaces it; delete one of them")
        datamodule = instantiate(try_get_key(cfg, "datamodule"))
    if datamodule is None:
        return None
    rows = step_plan(cfg).first.micro_batch_size
    return DataStages(datamodule, rows, cfg.train.test_micro_batch_size, _argument_names(cfg))


def _argument_names(cfg: Any) -> list[str]:
    """The arguments of the model, for batches that are tuples."""
    model = target_of(try_get_key(cfg, "model"), "model")
    forward = getattr(model, "forward", None)
    if forward is None:
        return []
    parameters = inspect.signature(forward).parameters.values()
    return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self"]


def get_batch_of(stages: DataStages, dataloader_idx: int = 0) -> GetBatch:
    """A `get_batch` for loader number `dataloader_idx`: the hooks of the data module make the model's arguments."""

    def get_batch(data: Any, input_placement_device: str = "cpu", mixup_func: Any = None) -> dict[str, Any]:
        return stages.inputs(mixed_up(data, mixup_func, input_placement_device), input_placement_device, dataloader_idx)

    return get_batch


_STATES = {"fit": "training", "validate": "validating", "test": "testing", "predict": "predicting"}


class RunsStages:
    """The part of a trainer that evaluates and predicts with the loaders of its data module.

    Attributes:
        training, validating, testing, predicting: whether the model is used for this now. Hooks of data modules read
            these attributes, as they do with Lightning's trainer.
    """

    cfg: Any
    model: Any
    graph_eval: Any
    test: Any
    data: DataStages | None
    training, validating, testing, predicting = True, False, False, False

    @contextmanager
    def _running(self, stage: str) -> Iterator[None]:
        before = {name: getattr(self, name) for name in _STATES.values()}
        vars(self).update({name: state == stage for state, name in _STATES.items()})
        try:
            yield
        finally:
            vars(self).update(before)

    def eval_model(self) -> Any:
        """The model, or in graph mode the graph for evaluation."""
        return self.graph_eval if self.graph_eval is not None else self.model

    def _test_on(self, loaders: list[Any]) -> dict[str, Any]:
        # Without a data module, only the arguments of LiBai's `test`, because a subclass may override it.
        given: dict[str, Any] = {} if self.data is None else {"data": self.data}
        results: dict[str, Any] = built_by(self, "test", self.cfg, loaders, self.eval_model(), **given)
        return results

    def evaluate(self, stage: str = "validate") -> dict[str, Any]:
        """Evaluate on the loaders of the stage "validate" or "test"; returns the results of `test`."""
        kinds = {"validate": "val", "test": "test"}
        check({"stage": one_of(*kinds)}, stage=stage)
        with self._running(stage):
            data, loaders = self._enter(stage, kinds[stage])
            results = self._test_on(loaders)
        data.leave(stage)
        return results

    def predict(self) -> Any:
        """Run the model over the predict loaders of the data module, each sample once.

        Returns:
            Output of the model -> array, on every rank; with several loaders a list of these. See `Predictions`.

        Raises:
            ConfigError: There is no data module, or no loader.
            SchemaError: The outputs of the batches cannot be joined.
        """
        train = self.cfg.train
        with self._running("predict"):
            data, loaders = self._enter("predict", "predict")
            predictions = [
                inference_on_dataset(
                    self.eval_model(),
                    loader,
                    train.test_micro_batch_size * get_data_parallel_size(),
                    float("inf"),
                    get_batch_of(data, number),
                    train.input_placement_device,
                    Predictions(),
                )
                for number, loader in enumerate(loaders)
            ]
        data.leave("predict")
        return predictions[0] if len(predictions) == 1 else predictions

    def _enter(self, stage: str, kind: str) -> tuple[DataStages, list[Any]]:
        """Enter a stage of the data module; returns the stages, and the loaders of `kind`."""
        if self.data is None:
            raise ConfigError(f"stage {stage!r} needs a data module: DefaultTrainer(cfg, datamodule=...)")
        self.data.enter(stage)
        loaders = self.data.loaders(kind)
        if not loaders:
            raise ConfigError(f"{type(self.data.datamodule).__name__} has no {kind}_dataloader")
        return self.data, loaders
