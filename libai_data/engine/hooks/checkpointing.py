"""When checkpoints are written, when evaluations run, and what their results decide: the best checkpoint, the end."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from typing import Any, Callable

from libai_data.engine.checkpoint import Checkpointer
from libai_data.engine.evaluation.evaluator import flatten_results_dict
from libai_data.engine.hooks.showing import PeriodicWriter
from libai_data.engine.train_loop import HookBase
from libai_data.engine.writers import EVALUATED
from libai_data.errors import CheckpointError, ConfigError, SchemaError, nearest
from libai_data.errors.argument_rules import TEXT, check, one_of, or_none, real, whole
from libai_data.errors.saved_state import Keys, check_state
from libai_data.mesh.current import broadcast_py_object, synchronize

logger = logging.getLogger(__name__)

DEFAULT_METRIC = "Acc@1"
"""Default of `train.evaluation.eval_metric`. Only this metric may be missing from the results."""


class PeriodicCheckpointer(HookBase):
    """Writes a checkpoint every `period` steps, and one named "<prefix>_final" after the last.

    A periodic checkpoint that cannot be written (a full disk) is reported, and the training continues with the older
    ones. The last checkpoint must be written, also if a signal stops the training.

    Args:
        max_to_keep: keep so many, and remove older ones; None keeps all. "<prefix>_final" does not count.
        file_prefix: beginning of the checkpoints' names; the index of the finished step follows, in 7 digits.
    """

    def __init__(
        self, checkpointer: Checkpointer, period: int, max_to_keep: int | None = None, file_prefix: str = "model"
    ) -> None:
        check({"period": whole(1), "max_to_keep": or_none(whole(1))}, period=period, max_to_keep=max_to_keep)
        self._checkpointer = checkpointer
        self._period = period
        self._max_to_keep = max_to_keep
        self._prefix = file_prefix
        self._recent: list[str] = []

    def before_train(self) -> None:
        self._recent = self._checkpointer.names_before(self._prefix, self.trainer.start_iter)

    def before_step(self) -> None:
        steps = self.trainer.iter - self.trainer.start_iter
        if steps == 0:
            self._checkpointer.note_start()
        elif steps == 1:
            self._checkpointer.check_states()  # Again, because later hooks may have changed their states.

    def after_step(self) -> None:
        iteration = self.trainer.iter
        if iteration == self.trainer.start_iter:
            self._checkpointer.check_states()  # The first checkpoint may be hours away.
        if (iteration + 1) % self._period:
            return
        self.trainer.losses.read_into(self.trainer.storage)
        for hook in self.trainer._hooks:
            if isinstance(hook, PeriodicWriter):  # A run that is killed after the checkpoint does not repeat the step.
                hook.after_step()
        try:
            self._save(iteration)
        except CheckpointError as error:
            logger.error("%s The training continues; earlier checkpoints are untouched.", error)

    def on_stop(self) -> None:
        iteration = self.trainer.iter - 1
        if iteration >= self.trainer.start_iter and self._name(iteration) not in self._recent:
            self._save(iteration)

    def after_train(self) -> None:
        name, iteration = f"{self._prefix}_final", self.trainer.iter - 1
        path = os.path.join(self._checkpointer.save_dir, name)
        # Without a step, an earlier run may have been killed before it wrote the checkpoint.
        if self.trainer.iter > self.trainer.start_iter or self._checkpointer.peek(path).get("iteration") != iteration:
            self._checkpointer.save(name, iteration=iteration)

    def _name(self, iteration: int) -> str:
        return f"{self._prefix}_{iteration:07d}"

    def _save(self, iteration: int) -> None:
        self._checkpointer.save(self._name(iteration), iteration=iteration)
        self._recent.append(self._name(iteration))
        if self._max_to_keep is not None:
            while len(self._recent) > self._max_to_keep:
                self._checkpointer.remove(self._recent.pop(0))


def validation_name(name: str) -> str:
    """The name under which the result of an evaluation is logged: the name of a loss begins with "val_".

    So the result is never confused with the loss of the training. `Dataset/loss` becomes `Dataset/val_loss`.
    """
    dataset, slash, metric = name.rpartition("/")
    is_training_loss = "loss" in metric and not metric.startswith(("val", "test", "eval"))
    return f"{dataset}{slash}val_{metric}" if is_training_loss else name


class _OnEvaluations(HookBase):
    """Acts every `eval_period` steps (0: never), and after the last step.

    Attributes:
        was_missed: called with a step; whether the training was interrupted before the results after it were written.
    """

    def __init__(self, eval_period: int, was_missed: Callable[[int], bool] = lambda step: False) -> None:
        check({"eval_period": whole(0)}, eval_period=eval_period)
        self._period = eval_period
        self.was_missed = was_missed
        self._acted_after = -1

    def before_train(self) -> None:
        """Act if the training was interrupted after the step before, and before the end of the action."""
        done = self.trainer.start_iter
        is_due = self._period > 0 and done % self._period == 0 and 0 < done < self.trainer.max_iter
        if is_due and self.was_missed(done - 1):
            self.trainer.storage.iter = done - 1
            self._act()

    def after_step(self) -> None:
        """Act if the period ends with this step; after the last step, `after_train` acts."""
        done = self.trainer.iter + 1
        self._acted_after = -1
        if self._period > 0 and done % self._period == 0 and done != self.trainer.max_iter:
            # Read the losses first: if one stops the training, no best checkpoint is written.
            self.trainer.losses.read_into(self.trainer.storage)
            self._act()
            self._acted_after = done

    def after_train(self) -> None:
        """Act a last time, unless this hook has already acted after the last step of a training that ended early."""
        if self._acted_after != self.trainer.iter:
            self._act()

    def _act(self) -> None:
        raise NotImplementedError

    def _results(self) -> dict[str, tuple[float, int]]:
        """The last value and its iteration of each result; without `EvalHook`, of all that is measured."""
        storage = self.trainer.storage
        return {
            name: value
            for name, value in storage.latest().items()
            if storage.results is None or name in storage.results
        }

    def _no_result(self, key: str, metric: str) -> str:
        """The message that the evaluation has no such metric as the config names with this key."""
        latest = [name for name, (_, at) in self._results().items() if at == self.trainer.storage.iter]
        return (
            f"{key} is {metric!r}, but the evaluation has no such result; there are {sorted(latest)}."
            f"{nearest(metric, latest)}"
        )


class EvalHook(_OnEvaluations):
    """Runs an evaluation every `eval_period` steps and after the last step, and puts its results. On every rank.

    Each result is put into the storage under its `validation_name`.

    Args:
        eval_period: in steps; 0 to evaluate only at the end.
        eval_function: has no arguments, and returns a (nested) dict of numbers.
        was_missed: whether an evaluation after this step was interrupted; the training then begins with it.
    """

    def __init__(
        self,
        eval_period: int,
        eval_function: Callable[[], dict[str, Any]],
        was_missed: Callable[[int], bool] = lambda step: False,
    ) -> None:
        super().__init__(eval_period, was_missed)
        self._eval_function = eval_function

    def _act(self) -> None:
        storage, start = self.trainer.storage, time.perf_counter()
        results = flatten_results_dict(self._eval_function() or {})
        names = [validation_name(name) for name in results]
        for name in names:
            if names.count(name) > 1:
                raise SchemaError(f"the evaluation has two results that are logged as {name!r}; rename one of them")
        known = storage.results or set()
        taken = sorted({*names} & storage.latest().keys() - known)
        if taken:
            logger.warning(
                f"The evaluation has results with the names of other numbers of the training: {taken}. Rename them: "
                "in the log and in metrics.json, each replaces the other."
            )
        storage.results = known.union(names)
        for name, value in zip(names, results.values()):
            storage.put_scalar(name, value, smoothing_hint=False)
        storage.put_scalar(EVALUATED, time.perf_counter() - start, smoothing_hint=False)
        storage.is_due = True
        synchronize()


_BEST = Keys({"metric": TEXT, "value": real(-1e308, 1e308), "iteration": whole(-1)})


class BestCheckpointer(_OnEvaluations):
    """Keeps the checkpoint with the best value of an evaluation metric, across resumes. Register it after `EvalHook`.

    If the evaluation has no such metric, the first evaluation ends the training with an error. If the missing metric is
    the default one, there is only a warning, as in LiBai, whose configs of language models do not change it.

    Args:
        eval_period: the same as that of `EvalHook`.
        val_metric: name of the metric, e.g. "Acc@1"; "loss" is the loss of the evaluation.
        mode: "max" if larger is better, otherwise "min".
        file_prefix: name of the checkpoint.
        was_missed: the same as that of `EvalHook`.
    """

    def __init__(
        self,
        eval_period: int,
        checkpointer: Checkpointer,
        val_metric: str,
        mode: str = "max",
        file_prefix: str = "model_best",
        was_missed: Callable[[int], bool] = lambda step: False,
    ) -> None:
        check({"mode": one_of("max", "min")}, mode=mode)
        super().__init__(eval_period, was_missed)
        self._checkpointer = checkpointer
        self._metric = validation_name(val_metric)
        self._sign = 1.0 if mode == "max" else -1.0
        self._name = file_prefix
        self.best_metric: float | None = None
        self.best_iter: int | None = None
        self._has_warned = False

    def before_train(self) -> None:
        # After an earlier checkpoint was loaded, the best result may be one of steps that are repeated.
        if self.best_iter is not None and self.best_iter >= self.trainer.start_iter:
            self.best_metric = self.best_iter = None
        if self.trainer.start_iter > 0:
            path = os.path.join(self._checkpointer.save_dir, self._name)
            best = self._checkpointer.peek(path).get("extra", {}).get("best")
            if best is not None:
                check_state(best, _BEST, "a training", "extra.best", path)
                if validation_name(best["metric"]) == self._metric and best["iteration"] < self.trainer.start_iter:
                    self.best_metric, self.best_iter = best["value"], best["iteration"]
        super().before_train()

    def _act(self) -> None:
        # Rank 0 decides, so that all ranks save, or none.
        value, iteration = broadcast_py_object(self._latest())
        if value is None or not math.isfinite(value):
            return
        if self.best_metric is not None and self._sign * value <= self._sign * self.best_metric:
            return
        best = {"metric": self._metric, "value": value, "iteration": iteration}
        try:
            self._checkpointer.save(self._name, iteration=iteration, is_last=False, extra={"best": best})
        except CheckpointError as error:
            logger.error("%s The training continues.", error)
            return
        self.best_metric, self.best_iter = value, iteration
        logger.info("%s = %.4f after iteration %d is the best so far.", self._metric, value, iteration)

    def _latest(self) -> Any:
        results = self._results()
        if self._metric in results:
            return results[self._metric]
        found = self._no_result("train.evaluation.eval_metric", self._metric)
        # LiBai's configs of language models keep the default. After the last step, everything else is saved already.
        if self._metric != DEFAULT_METRIC and self.trainer.iter < self.trainer.max_iter:
            raise ConfigError(found)
        if not self._has_warned:
            logger.warning("%s So no best checkpoint is kept.", found)
        self._has_warned = True
        return None, 0


_RULES = {"eval_period": whole(1), "patience": whole(1), "min_delta": real(0, 1e300), "mode": one_of("max", "min")}
_PROGRESS = {"best": or_none(real(-1e308, 1e308)), "best_iter": whole(-1), "evaluations_since_best": whole(0)}
_SAVED = Keys({"metric": TEXT, "mode": _RULES["mode"], **_PROGRESS})


class EarlyStopping(_OnEvaluations):
    """Ends the training after `patience` evaluations in a row without a better value of a metric. Register it after
    `EvalHook`.

    All ranks end after the same step, with the final checkpoint and evaluation of a training that is complete. A
    checkpoint that is written after this hook stores the state. A training that ended early does not continue when it
    is resumed, unless `patience` is increased.

    Args:
        eval_period: the same as that of `EvalHook`.
        metric: name of the metric, e.g. "Acc@1"; "loss" is the loss of the evaluation.
        patience: evaluations without an improvement.
        min_delta: a smaller change is no improvement.
        mode: "max" if larger is better, otherwise "min".
    """

    def __init__(
        self, eval_period: int, metric: str, patience: int = 3, min_delta: float = 0.0, mode: str = "max"
    ) -> None:
        check(_RULES, eval_period=eval_period, patience=patience, min_delta=min_delta, mode=mode)
        super().__init__(eval_period)
        self._metric = validation_name(metric)
        self._patience = patience
        self._min_delta = min_delta
        self._mode = mode
        self.best: float | None = None
        self.best_iter = -1
        self.evaluations_since_best = 0

    def state_dict(self) -> dict[str, Any]:
        """The best value, its iteration, and the evaluations since."""
        return {"metric": self._metric, "mode": self._mode, **{name: getattr(self, name) for name in _PROGRESS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; a state of another metric is ignored."""
        check_state(state, _SAVED, "a training", "EarlyStopping", "the checkpoint")
        if (state["metric"], state["mode"]) == (self._metric, self._mode):
            vars(self).update({name: state[name] for name in _PROGRESS})

    def before_train(self) -> None:
        if self.evaluations_since_best >= self._patience:
            self._log("The run has ended early")
            self.trainer.max_iter = self.trainer.start_iter

    def after_train(self) -> None:
        """Do nothing, because the training has ended anyway."""

    def _act(self) -> None:
        found, evaluated_at = self._results().get(self._metric, (0.0, -1))
        if evaluated_at != self.trainer.storage.iter:  # An earlier evaluation may have had the result.
            raise ConfigError(self._no_result("train.early_stopping.metric", self._metric))
        # Rank 0 decides, so that all ranks end, or none.
        value = broadcast_py_object(float(found))
        sign = 1.0 if self._mode == "max" else -1.0
        if math.isfinite(value) and (self.best is None or sign * (value - self.best) > self._min_delta):
            self.best, self.best_iter, self.evaluations_since_best = value, self.trainer.iter, 0
        else:
            self.evaluations_since_best += 1
        if self.evaluations_since_best >= self._patience:
            self._log("The training ends early")
            self.trainer.end_after_step()

    def _log(self, what: str) -> None:
        best = "no finite value" if self.best is None else f"{self.best:.4f} after iteration {self.best_iter}"
        logger.info(
            f"{what}: {self._metric} has not improved for {self.evaluations_since_best} evaluations "
            f"(train.early_stopping.patience); the best is {best}."
        )
