"""A live bar on a terminal."""

from __future__ import annotations

from typing import Any

from libai_data.engine.train_loop import HookBase


class ProgressBar(HookBase):
    """Shows, live: steps done, loss, samples/s, the share of time spent waiting for data, time left. For rank 0 on a
    terminal."""

    def __init__(self) -> None:
        self._bar: Any = None

    def before_train(self) -> None:
        """Draw it."""
        from tqdm import tqdm

        self._bar = tqdm(
            total=self.trainer.max_iter,
            initial=self.trainer.start_iter,
            unit="step",
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        )

    def after_step(self) -> None:
        """Move it."""
        self._bar.set_postfix(self._numbers(), refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        """Leave it as it stands."""
        if self._bar is not None:
            self._bar.close()

    def _numbers(self) -> dict[str, str]:
        latest = self.trainer.storage.latest()
        shown = {}
        for label, name, form in (
            ("loss", "total_loss", "{:.4g}"),
            ("samples/s", "samples_per_second", "{:.0f}"),
            ("data", "data_wait_share", "{:.0%}"),
        ):
            if name in latest:
                shown[label] = form.format(latest[name][0])
        return shown
