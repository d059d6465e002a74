"""Training: trainers, hooks, checkpoints, evaluation."""

from libai_data.engine.checkpoint import Checkpointer
from libai_data.engine.default_trainer import DefaultTrainer
from libai_data.engine.events import EventStorage, get_event_storage
from libai_data.engine.setup import default_setup
from libai_data.engine.step_trainers import EagerTrainer, GraphTrainer
from libai_data.engine.train_loop import HookBase, TrainerBase
from libai_data.engine.writers import EventWriter

__all__ = [
    "Checkpointer",
    "DefaultTrainer",
    "EagerTrainer",
    "EventStorage",
    "EventWriter",
    "GraphTrainer",
    "HookBase",
    "TrainerBase",
    "default_setup",
    "get_event_storage",
]
