"""Training by a compiled `nn.Graph`: forward, backward, update and schedule are one launch."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Optional

from libai_data.engine.batches import StepInputs
from libai_data.engine.train_loop import TrainerBase


class GraphTrainer(TrainerBase):
    """One graph that holds model, optimizer and schedule, and one loader.

    The graph itself cuts a step's inputs into micro-batches, so a step hands it `grad_acc_steps` consecutive batches
    joined along dim 0.

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
        check_inputs: Optional[Callable[[Dict[str, Any]], None]] = None,
    ) -> None:
        super().__init__()
        graph.model.train()
        self.graph = graph
        self.data_loader = data_loader
        self.grad_acc_steps = grad_acc_steps
        self.inputs = StepInputs(data_loader)
        self._check_inputs = check_inputs

    def run_step(  # type: ignore[override]
        self, get_batch: Callable[..., Dict[str, Any]], input_placement_device: str = "cuda"
    ) -> None:
        """Run one step.

        Args:
            get_batch: turns a batch of the loader into the model's keyword arguments.
            input_placement_device: "cuda" or "cpu", handed to `get_batch`.
        """
        self.inputs.seconds = 0.0
        batch = self.inputs.joined(self.grad_acc_steps, get_batch, input_placement_device)
        if self._check_inputs is not None:
            self._check_inputs(batch)
            self._check_inputs = None
        outputs = self.graph(**batch)
        # With gradient accumulation, each output has one value per micro-batch.
        self.write_metrics({name: value.mean() for name, value in outputs.items()}, self.inputs.seconds)
