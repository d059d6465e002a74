"""An output folder belongs to one run: who may write there, what is resumed, and what becomes of earlier results."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from libai_data.engine.output_folder import release_output_folder, take_output_folder
from libai_data.errors import CheckpointError, ConfigError
from libai_data.launch.restarts import JOB_VARIABLE
from libai_data.mesh.current import set_mesh
from tests.deadline import run_to_end, stretched
from tests.distributed.processes import REPOSITORY
from tests.engine.test_default_trainer import contents, trained
from tests.engine.tiny import tiny_config


class Child:
    """Another process, which takes the folder, says how that went, and lives until it is killed."""

    def __init__(self, folder: Path, resume: bool = False, **variables: str) -> None:
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.environ.update(variables)
                taken = take_output_folder(str(folder), resume)
                os.write(writer, f"{taken.resume} {os.path.basename(taken.moved_to)}".strip().encode())
                os.close(writer)
                signal.pause()
            except ConfigError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.close(writer)

    def says(self, seconds: float = 60.0) -> str | None:
        """Return what it says, or None if it does not within so many seconds."""
        ready = select.select([self._reader], [], [], stretched(seconds))[0]
        return os.read(self._reader, 4096).decode() if ready else None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._reader)


def take(folder: Path, resume: bool = False, **variables: str) -> str | None:
    """What a process says that takes the folder, and is killed then."""
    with live(folder, resume, **variables) as child:
        return child.says()


@contextmanager
def live(folder: Path, resume: bool = False, **variables: str) -> Iterator[Child]:
    child = Child(folder, resume, **variables)
    try:
        yield child
    finally:
        child.kill()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trained(tiny_config(str(folder), train_iter=5))
    set_mesh(None)
    return folder


@pytest.fixture()
def used(run: Path, tmp_path: Path) -> Path:
    """The output of a training."""
    return shutil.copytree(run, tmp_path / "run")


def test_a_second_training_is_refused_with_host_and_process_until_the_first_one_is_gone(tmp_path: Path) -> None:
    first = Child(tmp_path)
    assert first.says() == "False"
    with pytest.raises(ConfigError) as refused:
        take_output_folder(str(tmp_path), resume=True)
    assert f"still running on {os.uname().nodename} (process {first.pid}, since 2" in str(refused.value)
    assert "give another train.output_dir" in str(refused.value)
    first.kill()
    assert take(tmp_path) == "False"


@pytest.mark.parametrize("name", ["model_0000004", "model_final/sub", "saved"])
def test_a_folder_that_another_run_may_remove_as_its_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    assert take(tmp_path) == "False"
    if name == "saved":
        (tmp_path / name).mkdir()
        for file in ("state.json", "manifest.json"):
            (tmp_path / name / file).write_text("{}")
    with pytest.raises(
        ConfigError, match=r"train.output_dir .* is in .*, a checkpoint of the run in .* folder outside"
    ):
        take_output_folder(str(tmp_path / name), resume=False)
    assert take(tmp_path / "other") == "False"


def test_the_workers_of_a_training_do_not_keep_its_folder(tmp_path: Path) -> None:
    take_output_folder(str(tmp_path), resume=False)
    worker = os.fork()
    if worker == 0:
        signal.pause()
    try:
        assert "still running" in str(take(tmp_path))
        # As when the training ends: the worker has the same open file.
        release_output_folder(str(tmp_path))
        assert take(tmp_path) == "False"
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_a_restart_waits_for_the_end_of_the_attempt_before(tmp_path: Path) -> None:
    first = Child(tmp_path, LIBAI_DATA_JOB="a")
    assert first.says() == "False"
    with live(tmp_path, LIBAI_DATA_JOB="a") as second:
        assert second.says(4.0) is None
        first.kill()
        assert second.says() == "False"


def test_a_training_refuses_a_folder_in_use_before_it_writes_anything(tmp_path: Path) -> None:
    with live(tmp_path) as first:
        assert first.says() == "False"
        with pytest.raises(ConfigError, match="belongs to a training that is still running"):
            trained(tiny_config(str(tmp_path), train_iter=3))
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.slow
def test_a_launcher_names_no_job_twice(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "libai_data.launch", "tools/train_net.py", "--config-file"]
    command += ["tests/engine/tiny_config.py", f"train.output_dir={tmp_path}", "train.train_iter=3"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with live(tmp_path) as first:
        assert first.says() == "False"
        ended = run_to_end(command, 100, cwd=REPOSITORY, env=env)
    assert ended.returncode == 1
    assert "belongs to a training that is still running" in ended.stderr


def test_a_new_run_moves_what_an_earlier_one_left_aside_and_leaves_other_files_alone(used: Path) -> None:
    (used / "notes.txt").write_text("mine")
    (used / "data").mkdir()
    before = {name: text for name, text in contents(used).items() if name not in ("run.json", "notes.txt")}
    assert len(before) > 10
    for number in (1, 2):
        trainer = trained(tiny_config(str(used), train_iter=5))
        assert trainer.start_iter == 0
        assert f"contained an earlier run. It is now in {used}.{number}" in (used / "log.txt").read_text()
    assert contents(Path(f"{used}.1")) == before
    assert (used / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in used.parent.iterdir()) == ["run", "run.1", "run.2"]


def test_a_run_of_which_a_part_cannot_be_moved_aside_stays_whole(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, rename = contents(used), os.rename

    def move(source: Path, target: Path) -> None:
        if Path(source).parent == used and Path(source).name.startswith("model_"):
            raise OSError(errno.EBUSY, "a mount point")
        rename(source, target)

    monkeypatch.setattr(os, "rename", move)
    with pytest.raises(ConfigError, match=r"has an earlier run, which cannot be moved to .*run.1 .*mount point"):
        take_output_folder(str(used), resume=False)
    release_output_folder(str(used))
    assert contents(used) == before and not Path(f"{used}.1").exists()


def test_what_was_moved_aside_can_be_resumed(used: Path) -> None:
    trained(tiny_config(str(used), train_iter=5))
    assert trained(tiny_config(f"{used}.1", train_iter=7), resume=True).start_iter == 5


def test_a_resume_with_another_config_keeps_the_one_before(used: Path) -> None:
    before = (used / "config.yaml").read_bytes()
    for _ in range(2):
        changed = tiny_config(str(used), train_iter=7)
        changed.train.seed = 99
        with pytest.raises(CheckpointError, match="seed was"):
            trained(changed, resume=True)
        assert "seed: 99" in (used / "config.yaml").read_text()
    assert (used / "config.1.yaml").read_bytes() == before
    assert not (used / "config.2.yaml").exists()
    trained(tiny_config(str(used), train_iter=5))
    assert Path(f"{used}.1", "config.1.yaml").read_bytes() == before


def test_logs_of_attempts_that_came_to_nothing_are_kept(tmp_path: Path) -> None:
    for _ in range(3):
        cfg = tiny_config(str(tmp_path / "run"), train_iter=5)
        cfg.model.hidden = "many"
        with pytest.raises(Exception, match="TinyModel failed"):
            trained(cfg)
    assert (tmp_path / "run" / "log.txt").read_text().count("Mesh: ") == 3
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_weights_in_the_folder_itself_are_not_moved_away_from_under_a_new_run(used: Path) -> None:
    before = contents(used)
    with pytest.raises(ConfigError, match=r"load_weight .* is in"):
        trained(tiny_config(str(used), load_weight=str(used / "model_final")))
    assert {**contents(used), "run.json": b""} == {**before, "run.json": b""}


@pytest.mark.parametrize(
    ("last_week", "resume", "job", "told"),
    [
        # A fresh run starts anew, and so does its restart, if it came to nothing in the folder.
        ("week", False, "today", "False run.1"),
        # What this job wrote is resumed, with or without being asked; so is what the user asks for.
        ("today", False, "today", "True"),
        ("week", True, "today", "True"),
        ("week", True, "", "True"),
        # Nobody has named a job.
        ("", False, "", "False run.1"),
    ],
)
def test_a_restart_resumes_only_what_its_job_wrote_or_was_told_to(
    last_week: str, resume: bool, job: str, told: str, used: Path
) -> None:
    assert take(used, resume=True, LIBAI_DATA_JOB=last_week) == "True"
    assert take(used, resume, LIBAI_DATA_JOB=job) == told


def test_a_job_that_failed_before_its_first_checkpoint_starts_again_in_place(tmp_path: Path) -> None:
    assert take(tmp_path, LIBAI_DATA_JOB="a") == "False"
    (tmp_path / "log.txt").write_text("the first attempt")
    (tmp_path / "metrics.json").write_text("")
    assert take(tmp_path, LIBAI_DATA_JOB="a") == "False"
    assert (tmp_path / "log.txt").read_text() == "the first attempt"


def test_a_second_training_of_one_process_is_no_restart(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_VARIABLE, "notebook")
    assert take_output_folder(str(used), resume=False).moved_to == f"{used}.1"
    (used / "metrics.json").write_text("")
    assert take_output_folder(str(used), resume=False).moved_to == f"{used}.2"
    release_output_folder(str(used))


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", lock)
    take_output_folder(str(tmp_path), resume=False)
    assert "run.json cannot be locked" in caplog.text
    release_output_folder(str(tmp_path))


def test_a_folder_that_cannot_be_moved_or_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="file/run cannot be written"):
        take_output_folder(str(file / "run"), resume=False)


FAILS_ONCE = """
import os, sys
from libai_data.engine import DefaultTrainer
from libai_data.commands.train import main

class FailsOnce(DefaultTrainer):
    def run_step(self):
        super().run_step()
        if self.iter == 2 and not os.path.exists(sys.argv[0] + ".failed"):
            open(sys.argv[0] + ".failed", "w").close()
            raise RuntimeError("the first attempt fails")

main(trainer_class=FailsOnce)
"""


@pytest.mark.slow
def test_a_new_run_that_fails_before_its_first_checkpoint_is_restarted_at_step_0(used: Path, tmp_path: Path) -> None:
    """And not at the last checkpoint of the earlier run, which the folder held."""
    script = tmp_path / "script.py"
    script.write_text(FAILS_ONCE)
    command = [sys.executable, "-m", "libai_data.launch", "--max-restarts", "2", str(script), "--config-file"]
    command += ["tests/engine/tiny_config.py", f"train.output_dir={used}", "train.train_iter=5"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = run_to_end(command, 200, cwd=REPOSITORY, env=env)
    assert ended.returncode == 0, ended.stderr
    assert "restart 1 of 2, from this job's last checkpoint, if there is one" in ended.stderr
    log = (used / "log.txt").read_text()
    # Both attempts, in one log.
    assert log.count("Training from iteration 0 to 5.") == 2
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["run", "run.1"]
