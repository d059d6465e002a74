"""Training step by step, each operator run as Python comes to it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Callable

from libai_data.config.argument_rules import check, whole
from libai_data.engine.batches import StepInputs
from libai_data.engine.losses import total_loss
from libai_data.engine.train_loop import TrainerBase


class EagerTrainer(TrainerBase):
    """One loss, one optimizer, one loader, in OneFlow's eager mode.

    A step adds up the gradients of `grad_acc_steps` consecutive batches and updates the weights once, so that the
    gradient is that of the mean loss over all their samples.

    Args:
        model: a `oneflow.nn.Module` that takes a batch's fields as keyword arguments and returns a dict of losses.
        data_loader: any iterable of batches.
        optimizer: a `oneflow.optim.Optimizer`.
        grad_acc_steps: batches in a step.
        check_inputs: called once with the first batch's inputs, before the model sees them.
    """

    def __init__(
        self,
        model: Any,
        data_loader: Iterable[Any],
        optimizer: Any,
        grad_acc_steps: int = 1,
        check_inputs: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        super().__init__()
        check({"grad_acc_steps": whole(1)}, grad_acc_steps=grad_acc_steps)
        model.train()
        self.model = model
        self.data_loader = data_loader
        self.optimizer = optimizer
        self.grad_acc_steps = grad_acc_steps
        self.inputs = StepInputs(data_loader)
        self._check_inputs = check_inputs
        self._clips = [group._enable_clip_grad for group in optimizer.param_groups]

    def run_step(  # type: ignore[override]
        self, get_batch: Callable[..., dict[str, Any]], input_placement_device: str = "cuda"
    ) -> None:
        """Run one step.

        Args:
            get_batch: turns a batch of the loader into the model's keyword arguments.
            input_placement_device: "cuda" or "cpu", handed to `get_batch`.
        """
        self.inputs.seconds = 0.0
        mean_outputs: dict[str, Any] = {}
        for _ in range(self.grad_acc_steps):
            batch = self.inputs.micro_batch(get_batch, input_placement_device)
            if self._check_inputs is not None:
                self._check_inputs(batch)
                self._check_inputs = None
            outputs = self.model(**batch)
            (total_loss(outputs) / self.grad_acc_steps).backward()
            for name, value in outputs.items():
                share = value.detach() / self.grad_acc_steps
                mean_outputs[name] = mean_outputs[name] + share if name in mean_outputs else share
        self._clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.write_metrics(mean_outputs, self.inputs.seconds)

    def _clip_gradients(self) -> None:
        if not any(self._clips):
            return
        with warnings.catch_warnings():
            # OneFlow warns at every step about each group that does not ask for clipping.
            warnings.simplefilter("ignore")
            self.optimizer.clip_grad()
