"""Training by a compiled `nn.Graph`: forward, backward, update and schedule are one launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable

from libai_data.config.argument_rules import check, whole
from libai_data.engine.batches import StepInputs, name_inputs
from libai_data.engine.train_loop import TrainerBase


class GraphTrainer(TrainerBase):
    """One graph that holds model, optimizer and schedule, and one loader.

    A step hands the graph `grad_acc_steps` consecutive batches: joined along dim 0 if the graph cuts them into
    micro-batches itself, else side by side (`GraphBase.takes_micro_batches`).

    Args:
        graph: a `oneflow.nn.Graph` with an attribute `model`.
        data_loader: any iterable of batches.
        grad_acc_steps: batches in a step.
        check_inputs: called once with the first step's inputs, before the graph sees them.
    """

    def __init__(
        self,
        graph: Any,
        data_loader: Iterable[Any],
        grad_acc_steps: int = 1,
        check_inputs: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        super().__init__()
        check({"grad_acc_steps": whole(1)}, grad_acc_steps=grad_acc_steps)
        graph.model.train()
        self.graph = graph
        self.data_loader = data_loader
        self.grad_acc_steps = grad_acc_steps
        self.inputs = StepInputs(data_loader)
        self._check_inputs = check_inputs

    def run_step(  # type: ignore[override]
        self, get_batch: Callable[..., dict[str, Any]], input_placement_device: str = "cuda"
    ) -> None:
        """Run one step.

        Args:
            get_batch: turns a batch of the loader into the model's keyword arguments.
            input_placement_device: "cuda" or "cpu", handed to `get_batch`.
        """
        self.inputs.seconds = 0.0
        if getattr(self.graph, "takes_micro_batches", False):
            batches = [self.inputs.micro_batch(get_batch, input_placement_device) for _ in range(self.grad_acc_steps)]
        else:
            batches = [self.inputs.joined(self.grad_acc_steps, get_batch, input_placement_device)]
        if self._check_inputs is not None:
            self._check_inputs(batches[0])
            self._check_inputs = None
        outputs = self.graph(**(batches[0] if len(batches) == 1 else name_inputs(batches)))
        # With gradient accumulation, each output has one value per micro-batch.
        self.write_metrics({name: value.mean() for name, value in outputs.items()}, self.inputs.seconds)
