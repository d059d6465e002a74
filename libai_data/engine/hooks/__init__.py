"""What happens around training steps."""

from libai_data.engine.hooks.checkpointing import BestCheckpointer, PeriodicCheckpointer
from libai_data.engine.hooks.data_progress import DataProgress
from libai_data.engine.hooks.evaluation import EvalHook
from libai_data.engine.hooks.iteration_timer import IterationTimer
from libai_data.engine.hooks.lr_schedule import LRScheduler
from libai_data.engine.hooks.periodic_writer import PeriodicWriter
from libai_data.engine.hooks.progress_bar import ProgressBar
from libai_data.engine.hooks.stop_on_signal import StopOnSignal
from libai_data.engine.train_loop import HookBase

__all__ = [
    "BestCheckpointer",
    "DataProgress",
    "EvalHook",
    "HookBase",
    "IterationTimer",
    "LRScheduler",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "ProgressBar",
    "StopOnSignal",
]
