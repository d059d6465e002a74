"""The base class of evaluators, and their results for logs and writers."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from libai_data.errors import SchemaError, error_text
from libai_data.errors.argument_rules import check_methods
from libai_data.mesh.arrays import is_flow_tensor
from libai_data.mesh.current import check_can_be_sent, is_main_process


class DatasetEvaluator:
    """Gets the inputs and outputs of a model batch by batch, and computes metrics at the end.

    Implement `process` and `evaluate`; the other methods have defaults. Each sample of the dataset is evaluated once,
    on any number of ranks.

    Attributes:
        input_fields: inputs that `process` needs; None for all. Other inputs are not sent to rank 0.
    """

    input_fields: Sequence[str] | None = None

    def reset(self) -> None:
        """Begin a new round."""

    def prepare(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
        """Choose the outputs that are sent to rank 0, or reduce them to smaller tensors. Called on every rank.

        Args:
            inputs: argument of the model -> tensor of the whole batch, padding included; global if there are several
                ranks.
            outputs: output of the model -> tensor, likewise.

        Returns:
            What `process` gets as its outputs. By default all.
        """
        return outputs

    def process(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Process one batch. Called on rank 0.

        Args:
            inputs: field -> local CPU tensor [samples that count, ...].
            outputs: what `prepare` returned, as local CPU tensors. Tensors with the batch's rows have the same rows as
                `inputs`, in the same order; other tensors are unchanged.
        """

    def evaluate(self) -> dict[str, Any] | None:
        """Compute the metrics. Called on every rank; only rank 0's result is used.

        Returns:
            Metric -> number, or a dict of such dicts.
        """


class DatasetEvaluators(DatasetEvaluator):
    """Several evaluators as one; their metrics must have different names."""

    def __init__(self, evaluators: Sequence[DatasetEvaluator]) -> None:
        self._evaluators = list(evaluators)
        for evaluator in self._evaluators:
            check_evaluator(evaluator)
        self._chosen: list[dict[str, str]] = []
        fields = [getattr(evaluator, "input_fields", None) for evaluator in self._evaluators]
        if all(each is not None for each in fields):
            self.input_fields = sorted({name for each in fields for name in each or ()})

    def reset(self) -> None:
        for evaluator in self._evaluators:
            evaluator.reset()

    def prepare(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
        """The outputs that the evaluators prepare; a tensor that several evaluators choose is sent once."""
        chosen: dict[str, Any] = {}
        names: dict[int, str] = {}
        self._chosen = []
        for evaluator in self._evaluators:
            own = {}
            for name, tensor in prepared(evaluator, inputs, outputs).items():
                own[name] = names.setdefault(id(tensor), f"{len(names)} {name}")
                chosen[own[name]] = tensor
            self._chosen.append(own)
        return chosen

    def process(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        for evaluator, chosen in zip(self._evaluators, self._chosen):
            # Outputs that are None have been left out.
            evaluator.process(inputs, {name: outputs[where] for name, where in chosen.items() if where in outputs})

    def evaluate(self) -> dict[str, Any]:
        """All metrics; raises ValueError if two evaluators use the same name."""
        results: dict[str, Any] = OrderedDict()
        for evaluator in self._evaluators:
            for name, value in evaluated(evaluator).items():
                if name in results:
                    raise ValueError(f"two evaluators return a metric '{name}'; rename one of them")
                results[name] = value
        return results


logger = logging.getLogger(__name__)


def flatten_results_dict(results: Mapping[str, Any]) -> dict[str, Any]:
    """Make {"task/metric": value} from {"task": {"metric": value}}, at any depth.

    Raises:
        SchemaError: Two results get the same name.
    """
    flat: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, Mapping):
            found = {f"{name}/{inner}": number for inner, number in flatten_results_dict(value).items()}
        else:
            found = {str(name): value}
        for twice in flat.keys() & found.keys():
            raise SchemaError(f"the evaluation returned two results {twice!r}; rename one of them")
        flat.update(found)
    return flat


def prepared(evaluator: DatasetEvaluator, inputs: dict[str, Any], outputs: Any) -> Mapping[str, Any]:
    """What `evaluator.prepare` returns; a SchemaError if it is no dict."""
    chosen = evaluator.prepare(inputs, outputs)
    if not isinstance(chosen, Mapping):
        raise SchemaError(
            f"prepare of {type(evaluator).__name__} returned a {type(chosen).__name__}; it must return a dict of "
            "tensors"
        )
    return chosen


def evaluated(evaluator: DatasetEvaluator) -> Mapping[str, Any]:
    """What `evaluator.evaluate` returns; on rank 0, a SchemaError if it is no dict that can be sent to other ranks."""
    results = evaluator.evaluate()
    whose = f"evaluate of {type(evaluator).__name__} returned"
    if not isinstance(results, (Mapping, type(None))):
        raise SchemaError(f"{whose} a {type(results).__name__}; return a dict of numbers")
    if results is None or not is_main_process():
        return results or {}
    for what, value in [(repr(name), value) for name, value in flatten_results_dict(results).items()] + [("", results)]:
        try:
            if is_flow_tensor(value) and value.is_global:
                raise TypeError("it is a global tensor")
            check_can_be_sent(value)
        except Exception as error:  # Methods of users' classes run here.
            raise SchemaError(
                f"{whose} {what}{', ' * bool(what)}a {type(value).__name__}, which cannot be sent to the other ranks "
                f"({error_text(error)}); return a plain dict of numbers, such as {{'name': float(value)}}"
            ) from error
    return results


def check_evaluator(evaluator: Any) -> None:
    """Raise ConfigError if an object lacks a method of `DatasetEvaluator`."""
    base = "libai_data.engine.evaluation.DatasetEvaluator"
    check_methods("the evaluator", evaluator, base, "reset", "prepare", "process", "evaluate")


def print_csv_format(results: Mapping[str, Any], name: str = "test") -> None:
    """Log results, metric -> number or dicts of these, as two lines for a table; raises SchemaError for others."""
    if not isinstance(results, Mapping):
        raise SchemaError(f"the evaluation on {name} returned a {type(results).__name__}; return a dict of numbers")
    flat = flatten_results_dict(results)
    if not flat:
        logger.warning(
            "The evaluation on %s has no result: train.evaluation.evaluator is None, or its evaluate() returned none.",
            name,
        )
        return
    numbers = []
    for metric, value in flat.items():
        try:
            numbers.append(float(value.__float__()))  # not `float(value)`, which accepts texts
        except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise SchemaError(
                f"the evaluation on {name} returned {metric!r}: {value!r:.100}; return a dict of numbers"
            ) from error
    logger.info("Results on %s: %s", name, ",".join(flat))
    logger.info("Results on %s: %s", name, ",".join(f"{number:.4f}" for number in numbers))
