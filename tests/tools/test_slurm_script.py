"""`tools/launch_slurm.sbatch`: by a SLURM of this one machine, and, for several, with the variables that one sets."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from libai_data.data.samplers import Order
from tests.deadline import Deadline, run_to_end
from tests.distributed.jobs import runs_of
from tests.distributed.processes import JOB_VARIABLES, REPOSITORY
from tests.tools.slurm import one_machine_slurm, why_no_slurm

SCRIPT = REPOSITORY / "tools" / "launch_slurm.sbatch"
TRAINING = REPOSITORY / "tests" / "distributed" / "scripts" / "noting_training.py"
STEPS = 25
WATCHDOG = 100.0
# What SLURM 22.05 sets for the second start of job 4711 on two machines, recorded from one, with the names changed.
RECORDED = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node-[07-08]",
    "SLURM_SUBMIT_DIR": str(REPOSITORY),
    "SLURM_RESTART_COUNT": "1",
}
CONFIG = """
from tests.engine.tiny import tiny_config
_cfg = tiny_config({folder!r}, train_iter={steps})
_cfg.train.checkpointer.period = 1000
_cfg.train.evaluation.enabled = False
train, graph, model, optim, dataloader = (_cfg[name] for name in ("train", "graph", "model", "optim", "dataloader"))
"""


def stand_in(folder: Path, name: str, text: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/bash\n{text}\n")
    program.chmod(0o755)


def run_by_stand_ins(folder: Path, srun: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with stand-ins for srun and scontrol, which say what they are asked for."""
    stand_in(folder, "srun", srun)
    stand_in(
        folder,
        "scontrol",
        'if [[ $1 == show ]]; then [[ "$*" == "show hostnames node-[07-08]" ]] && printf "node-07\\nnode-08\\n"\n'
        'else echo "scontrol $*"; fi',
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    env.update({**RECORDED, **variables, "PATH": f"{folder}:{os.environ['PATH']}"})
    command = ["bash", str(SCRIPT), "f.py", "c.py", "8", "a=[x, y]"]
    return run_to_end(command, env=env)


def test_each_machine_is_told_of_all_by_the_variables_of_slurm(tmp_path: Path) -> None:
    """The stand-in runs the task as node 1 of the job, with train.sh replaced by what prints."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "train.sh").write_text(
        'echo "$NODE $NODE_RANK $ADDR $PORT $LIBAI_DATA_JOB ${LIBAI_DATA_RESTARTED:-}"; printf "%s\\n" "$@"\n'
    )
    ended = run_by_stand_ins(tmp_path, 'shift; SLURM_NODEID=1 exec "$@"', SLURM_SUBMIT_DIR=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    described = f"2 1 node-07 {15000 + 4711} slurm-4711 1"
    assert ended.stdout.splitlines() == [described, "f.py", "c.py", "8", "--resume", "a=[x, y]"]


def test_the_first_start_does_not_resume(tmp_path: Path) -> None:
    ended = run_by_stand_ins(tmp_path, 'printf "%s\\n" "$@"', SLURM_RESTART_COUNT="0")
    assert "f.py" in ended.stdout
    assert "--resume" not in ended.stdout


@pytest.mark.parametrize(("code", "requeued"), [(85, True), (1, False), (0, False)])
def test_only_what_saved_and_stopped_is_queued_again(code: int, requeued: bool, tmp_path: Path) -> None:
    ended = run_by_stand_ins(tmp_path, f"exit {code}")
    assert ended.returncode == code
    assert ("scontrol requeue 4711" in ended.stdout) == requeued


def test_a_signal_is_passed_on_and_waited_for(tmp_path: Path) -> None:
    step = "trap 'sleep 0.3; exit 85' USR1; while :; do kill -USR1 $PPID; sleep 0.05; done"
    ended = run_by_stand_ins(tmp_path, step)
    assert ended.returncode == 85
    assert "scontrol requeue 4711" in ended.stdout


def test_a_checkout_elsewhere_is_asked_for(tmp_path: Path) -> None:
    ended = run_by_stand_ins(tmp_path, "exit 0", SLURM_SUBMIT_DIR=str(tmp_path / "elsewhere"))
    assert ended.returncode == 2
    assert "submit from the checkout, or set LIBAI_DATA_ROOT to it" in ended.stderr


@pytest.mark.slow
@pytest.mark.skipif(why_no_slurm() is not None, reason=why_no_slurm() or "")
def test_a_job_that_slurm_stops_is_queued_again_and_goes_on_exactly(tmp_path: Path) -> None:
    """Two ranks on the one machine; SLURM sends the job the signal that it sends before the time limit."""
    config, log, output = (tmp_path / name for name in ("config.py", "log", "output"))
    config.write_text(CONFIG.format(folder=str(output), steps=STEPS))
    with tempfile.TemporaryDirectory(prefix="slurm_") as folder, one_machine_slurm(Path(folder)) as environment:
        env = {name: value for name, value in environment.items() if name not in JOB_VARIABLES}
        env["PYTHONPATH"] = str(REPOSITORY)
        env["LIBAI_DATA_RESTS"] = "0.2"
        submit = ["sbatch", "--parsable", "--nodes=1", f"--output={log}", str(SCRIPT), str(TRAINING), str(config), "2"]
        job = subprocess.run(submit, check=True, capture_output=True, text=True, cwd=REPOSITORY, env=env).stdout.strip()
        told = hurried = False
        deadline = Deadline(WATCHDOG)
        while True:
            state = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, env=env).stdout
            if "JobState=COMPLETED" in state:
                break
            logs = [log, *(Path(folder) / name for name in ("slurmctld.log", "slurmd.log"))]
            shown = state + "\n".join(path.read_text() for path in logs if path.exists())
            assert "JobState=FAILED" not in state and not deadline.has_passed, shown
            if not told and any(4 in run for run in runs_of(output, 0)):
                told = True
                subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True, env=env)
            if told and not hurried and "JobState=PENDING" in state:
                # It waits for two minutes by itself, and must for some seconds: slurmd refuses what it has just killed.
                hurry = ["scontrol", "update", f"JobId={job}", "StartTime=now+3"]
                hurried = subprocess.run(hurry, env=env, capture_output=True).returncode == 0
            time.sleep(0.1)
    text = log.read_text()
    assert "exit code 85" in text, text
    assert "the job is queued again" in text, text
    before, after = runs_of(output, 0)
    other_before, other_after = runs_of(output, 1)
    assert re.search(rf"Training from iteration {min(after)} to {STEPS}", text)
    assert min(after) == max(before) + 1
    _, indices = Order(40, 1234).locate(np.arange(STEPS * 8))
    taken = {
        step: first[step] + second[step]
        for first, second in ((before, other_before), (after, other_after))
        for step in first
    }
    assert taken == {step: [str(i) for i in indices[step * 8 : (step + 1) * 8].tolist()] for step in range(STEPS)}
