"""Trainers of one model and one loader: in OneFlow's eager mode, and by a compiled `nn.Graph`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Callable

from libai_data.engine.batches import StepInputs, name_inputs
from libai_data.engine.evaluation.inference import module_of
from libai_data.engine.losses import mean_of, total_loss
from libai_data.engine.optim import complete_state
from libai_data.engine.train_loop import TrainerBase
from libai_data.errors.argument_rules import check, whole


class _StepTrainer(TrainerBase):
    """The common part of both trainers.

    Args:
        data_loader: any iterable of batches.
        grad_acc_steps: batches in a step.
        check_inputs: called once with the first inputs, before the model or graph sees them.

    Attributes:
        on_inputs: called with the model's inputs, and the `BatchInfo` (or None) of each batch that is joined in them.
    """

    def __init__(
        self,
        data_loader: Iterable[Any],
        grad_acc_steps: int,
        check_inputs: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        super().__init__()
        check({"grad_acc_steps": whole(1)}, grad_acc_steps=grad_acc_steps)
        self.data_loader = data_loader
        self.grad_acc_steps = grad_acc_steps
        self.inputs = StepInputs(data_loader)
        self._check_inputs = check_inputs
        self.on_inputs: Callable[[dict[str, Any], list[Any]], None] = lambda inputs, infos: None

    def run_step(  # type: ignore[override]
        self, get_batch: Callable[..., dict[str, Any]], input_placement_device: str = "cuda"
    ) -> None:
        """Run one step; `get_batch` makes the model's arguments from a batch and a device, "cuda" or "cpu"."""
        self.inputs.seconds = 0.0

        def next_inputs(batches: int) -> dict[str, Any]:
            inputs = self.inputs.joined(batches, get_batch, input_placement_device)
            if self._check_inputs is not None:
                self._check_inputs(inputs)
                self._check_inputs = None
            self.on_inputs(inputs, self.inputs.infos)
            return inputs

        self.write_metrics(self._step(next_inputs), self.inputs.seconds)

    def _step(self, next_inputs: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
        """Update the weights; returns the losses. `next_inputs(n)` makes the model's inputs from the next n batches."""
        raise NotImplementedError


class EagerTrainer(_StepTrainer):
    """One loss, one optimizer, one loader, in OneFlow's eager mode.

    A step adds up the gradients of `grad_acc_steps` consecutive batches and updates the weights once. If the batches
    have equal sizes, the gradient is that of the mean loss over all their samples.

    Args:
        model: a `oneflow.nn.Module` with a batch's fields as keyword arguments, which returns a dict of losses.
        optimizer: a `oneflow.optim.Optimizer`.
    """

    def __init__(
        self,
        model: Any,
        data_loader: Iterable[Any],
        optimizer: Any,
        grad_acc_steps: int = 1,
        check_inputs: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        super().__init__(data_loader, grad_acc_steps, check_inputs)
        model.train()
        self.model = model
        self.optimizer = optimizer

    def _step(self, next_inputs: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
        mean_outputs: dict[str, Any] = {}
        # An interrupted step or a hook may have left gradients. If they were zero, momentum would change weights that
        # have no gradient in this step, but not after a resume.
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.grad_acc_steps):
            outputs = self.model(**next_inputs(1))
            loss = total_loss(outputs) / self.grad_acc_steps
            loss.backward()
            for name, value in outputs.items():
                if value is None:
                    continue
                # Other outputs than losses may have other rows in the next batch.
                share = mean_of(value.detach()) / self.grad_acc_steps
                mean_outputs[name] = mean_outputs[name] + share if name in mean_outputs else share
        if any(group._enable_clip_grad for group in self.optimizer.param_groups):
            with warnings.catch_warnings():
                # In every step, OneFlow warns about each group without clipping.
                warnings.simplefilter("ignore")
                self.optimizer.clip_grad()
        complete_state(self.optimizer)
        self.optimizer.step()
        return mean_outputs


class GraphTrainer(_StepTrainer):
    """One graph with model, optimizer and schedule, and one loader: a step is one call of the graph.

    A step passes `grad_acc_steps` consecutive batches to the graph. If the graph itself splits its inputs into
    micro-batches, they are joined along dim 0, else they are separate arguments (`GraphBase.takes_micro_batches`).

    Args:
        graph: a `oneflow.nn.Graph` with an attribute `model`.
    """

    def __init__(
        self,
        graph: Any,
        data_loader: Iterable[Any],
        grad_acc_steps: int = 1,
        check_inputs: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        super().__init__(data_loader, grad_acc_steps, check_inputs)
        # The graph's proxies of the modules would keep a mode of their own, and hide that of a frozen BatchNorm.
        module_of(graph).train()
        self.graph = graph

    def _step(self, next_inputs: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
        if getattr(self.graph, "takes_micro_batches", False):
            inputs = name_inputs([next_inputs(1) for _ in range(self.grad_acc_steps)])
        else:
            inputs = next_inputs(self.grad_acc_steps)
        # With gradient accumulation, each output has one value per micro-batch.
        return {name: mean_of(value) for name, value in self.graph(**inputs).items() if value is not None}
