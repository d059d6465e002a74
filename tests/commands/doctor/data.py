"""A dataset that is sound, slow, stuck, broken or another one, as each rank's environment says."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

SICK = "LIBAI_DATA_TEST_SICK"


class Numbers:
    def __init__(self, length: int = 40) -> None:
        self.length, self.sick = length, os.environ.get(SICK, "")
        if self.sick == "broken":
            raise OSError("the data is not on this node")

    def __len__(self) -> int:
        return self.length

    def fingerprint(self) -> str:
        return "another" if self.sick == "another" else "the one"

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.sick == "stuck":
            time.sleep(600)
        if self.sick == "slow":
            time.sleep(0.2)
        return {"numbers": np.full(64, index, np.float32)}
