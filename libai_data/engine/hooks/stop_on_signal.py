"""A training that gets a signal saves a checkpoint, and exits with a code which says that it can resume."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from libai_data.engine.train_loop import HookBase, TrainingStopped
from libai_data.errors import ConfigError, nearest
from libai_data.launch.launcher import FORWARDED, STOPPED
from libai_data.mesh.current import synchronize
from libai_data.mesh.peers.liveness import watch_over_ranks

logger = logging.getLogger(__name__)

_KNOWN = {signum.name: signum for signum in FORWARDED}


class StopOnSignal(HookBase):
    """Ends the training at the next step boundary after a signal, with a checkpoint and exit code 85.

    It is enough that one rank gets the signal: the ranks agree on the step (`StopAgreement`). If the training reaches
    its last step first, it ends as usual. `PeriodicCheckpointer.on_stop` writes the checkpoint; register this hook
    after it.

    Args:
        signals: names of signals that the launcher forwards, such as "SIGTERM"; other names raise ConfigError.
    """

    def __init__(self, signals: Sequence[str] = ("SIGTERM", "SIGUSR1")) -> None:
        for name in signals:
            if name not in _KNOWN:
                raise ConfigError(
                    f"train.checkpointer.stop_signals has {name!r}; known are {sorted(_KNOWN)}.{nearest(name, _KNOWN)}"
                )
        self._signals = [_KNOWN[name] for name in signals]
        self._before: dict[int, Any] = {}
        self._received: int | None = None

    def before_train(self) -> None:
        self._liveness = watch_over_ranks()
        self._liveness.stop.begin(self.trainer.start_iter)
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "Only the main thread gets signals: in this thread they end the training at once, without a checkpoint."
            )
            return
        for signum in self._signals:
            self._before[signum] = signal.signal(signum, self._handle)

    def before_step(self) -> None:
        if self._liveness.stop.reaches(self.trainer.iter):
            raise TrainingStopped

    def on_stop(self) -> None:
        """Wait until all ranks have stopped. From now on, the signals are ignored, because the process ends."""
        for signum in self._signals:
            if signum in self._before:
                signal.signal(signum, signal.SIG_IGN)
        self._before.clear()
        synchronize()
        logger.info(
            "Stopped before step %d, on %s; the job ends with exit code %d. Resume to continue.",
            self.trainer.iter,
            signal.Signals(self._received).name if self._received else "another rank's signal",
            STOPPED,
        )

    def close(self) -> None:
        for signum, handler in self._before.items():
            # None: the handler was not installed from Python, so it cannot be restored.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._received = signum
        self._liveness.ask_to_stop()
