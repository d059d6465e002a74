"""The training command, with a trainer that notes the samples of each step: `noting_training.py --config-file FILE`.

LIBAI_DATA_RESTS is the seconds by which each step takes longer, so that something can happen meanwhile.
"""

from __future__ import annotations

import os

from libai_data.commands.train import run
from libai_data.config import default_argument_parser
from libai_data.engine.failure import end_job_on_failure
from libai_data.mesh import say_farewell
from tests.distributed.noting import NotingTrainer

with end_job_on_failure(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])):
    run(default_argument_parser().parse_args(), NotingTrainer)
    say_farewell()
