"""What happens around training steps."""

from libai_data.engine.hooks.checkpointing import BestCheckpointer, EarlyStopping, EvalHook, PeriodicCheckpointer
from libai_data.engine.hooks.measuring import DataProgress, IterationTimer, LRScheduler
from libai_data.engine.hooks.showing import PeriodicWriter, ProgressBar
from libai_data.engine.hooks.stop_on_signal import StopOnSignal
from libai_data.engine.train_loop import HookBase

__all__ = [
    "BestCheckpointer",
    "DataProgress",
    "EarlyStopping",
    "EvalHook",
    "HookBase",
    "IterationTimer",
    "LRScheduler",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "ProgressBar",
    "StopOnSignal",
]
