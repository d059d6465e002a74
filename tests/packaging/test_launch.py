"""`python -m libai_data.launch`: OneFlow's flags and environment; signals, failures and exit codes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Callable

import pytest

from libai_data.commands import COMMANDS
from libai_data.launch import launcher, ports
from tests.deadline import printed_by, run_to_end
from tests.pipes import next_line

REPOSITORY = Path(__file__).resolve().parents[2]
# Rank 0 listens, as OneFlow's does, so that the launcher starts the other ranks.
PREAMBLE = """
import json, os, signal, socket, subprocess, sys, time
rank = os.environ["RANK"]
def say(*words):  # A line in one piece, since ranks share the output.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
if rank == "0":
    server = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
"""


@pytest.fixture()
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


class Job:
    """A launcher in a process of its own, whose output, that of its ranks included, can be awaited."""

    def __init__(self, arguments: Sequence[str], settings: str = "") -> None:
        code = "import sys; from libai_data.launch import launcher, ranks, signals; "
        code += f"{settings}; sys.exit(launcher.main())"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=REPOSITORY,
        )

    def wait_for(self, word: str, times: int) -> None:
        while times:
            line = next_line(self.process)
            assert line, f"the job ended before it printed {word!r} often enough"
            times -= line.strip() == word

    def end(self) -> str:
        """Wait until every process that holds the output, the ranks and what they started, has ended."""
        return printed_by(self.process)[0]


StartJob = Callable[..., Job]


@pytest.fixture()
def start() -> Iterator[StartJob]:
    jobs: list[Job] = []

    def start_job(*arguments: object, settings: str = "pass") -> Job:
        jobs.append(Job([str(argument) for argument in arguments], settings))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.process.kill()
        job.process.wait()


def run(*arguments: object, module: str = "libai_data.launch") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return run_to_end(command, cwd=REPOSITORY)


def test_it_takes_the_flags_that_oneflow_launcher_takes_except_two() -> None:
    def flags(module: str) -> set[str]:
        return set(re.findall(r"--?[a-z_]+", run("--help", module=module).stdout.split("optional arguments")[-1]))

    theirs = {flag for flag in flags("oneflow.distributed.launch") if flag.startswith("--")}
    assert {"--nnodes", "--node_rank", "--nproc_per_node", "--master_addr", "--master_port"} <= theirs
    assert theirs - flags("libai_data.launch") == {"--no_python", "--redirect_stdout_and_stderr"}


def test_ranks_get_the_environment_that_oneflow_launcher_gives(script: Path) -> None:
    names = ["MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "OMP_NUM_THREADS", "GLOG_log_dir"]
    script.write_text(PREAMBLE + f"say(json.dumps([os.environ.get(name) for name in {names}] + sys.argv[1:]))")

    def environments(module: str) -> list[str]:
        port = launcher.free_port()
        result = run("--nproc_per_node", 2, "--master_port", port, script, "--an", "argument", module=module)
        assert result.returncode == 0, result.stderr
        return sorted(line.replace(str(port), "PORT") for line in result.stdout.splitlines() if line.startswith("["))

    ours = environments("libai_data.launch")
    assert len(ours) == 2
    assert ours == environments("oneflow.distributed.launch")


def test_the_port_is_a_free_one_on_one_node_and_on_several_the_one_that_all_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free_port = launcher.free_port()
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setattr(ports, "FREE_PORTS", [taken.getsockname()[1]] * 199 + [free_port])
        assert launcher.parse_args(["-m", "anything"]).master_port == free_port
    assert launcher.parse_args(["--nnodes", "2", "-m", "anything"]).master_port == launcher.DEFAULT_PORT


def test_a_command_of_libai_data_runs_on_the_ranks() -> None:
    words = ["config.py", "train.train_iter=100", "--resume", "optim.lr=0.001"]
    for name in launcher.COMMANDS:
        args = launcher.parse_args([name, *words])
        assert args.module and args.training_script_args == words
        assert COMMANDS[name].module == args.training_script
    shown = run("train", "--help")
    assert shown.returncode == 0 and shown.stdout.startswith("usage: libai-data train")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc_per_node", "0", "-m", "x"], "--nproc_per_node is 0; it must be 1 to 1024"),
        (["--nproc_per_node", "100000", "-m", "x"], "--nproc_per_node is 100000; it must be 1 to 1024"),
        (["--nnodes", "0", "-m", "x"], "--nnodes is 0"),
        (["--nnodes", "2", "--node_rank", "2", "-m", "x"], "with --nnodes 2 it must be 0 to 1"),
        (["--master_port", "65536", "-m", "x"], "must be 1 to 65535"),
        (["--master_addr", "10.0.0..1", "-m", "x"], "--master_addr is '10.0.0..1', which is no address and no name"),
        (["--master_addr", "10.0.0.1 10.0.0.2", "-m", "x"], "is '10.0.0.1 10.0.0.2', which is no address and no name"),
        (["--stop_grace_seconds", "-1", "-m", "x"], "--stop_grace_seconds is -1.0; it must be at least 0"),
        (["/no/such/script.py"], "there is no script /no/such/script.py"),
        (["trian", "c.py"], "there is no script trian (working directory"),
        (["trian", "c.py"], "Did you mean 'train'?"),
        (["/"], "the script / is a folder; name a file, or with -m a module"),
        (["--no_python", "-m", "x"], "unrecognized arguments: --no_python"),
        (["--redirect_stdout_and_stderr", "-m", "x"], "unrecognized arguments: --redirect_stdout_and_stderr"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        launcher.parse_args(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_script_that_may_not_be_read_is_refused_before_anything_starts(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK)  # As root, every file may be read.
    with pytest.raises(SystemExit):
        launcher.parse_args([str(script)])
    assert f"the script {script} may not be read by this user" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["libai_data.launch x.py", "libai_data launch train x.py", "libai_data plan x.py"])
def test_a_working_directory_that_was_deleted_is_named(command: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    # The interpreter itself finds the package although there is no working directory.
    shell = 'cd "$1" && rmdir "$1" && exec env PYTHONPATH="$2" "$3" -m $4'
    ended = run_to_end(["sh", "-c", shell, "sh", str(gone), str(REPOSITORY), sys.executable, command])
    assert ended.returncode == 1
    (line,) = (ended.stdout + ended.stderr).splitlines()
    assert f"the working directory {gone} was deleted, and relative paths begin there" in line
    assert "cd FOLDER" in line


@pytest.mark.parametrize(
    ("end", "code", "how", "last_line"),
    [
        ("raise ValueError('culprit')", 1, "exit code 1", "  | ValueError: culprit"),
        ("sys.stderr.write('culprit'); sys.exit(7)", 7, "exit code 7", "  | culprit"),
        # One that says nothing is named all the same.
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "signal SIGKILL", ""),
    ],
)
def test_the_first_rank_that_fails_ends_the_others_gives_its_exit_code_and_is_heard_last(
    end: str, code: int, how: str, last_line: str, script: Path, start: StartJob
) -> None:
    script.write_text(
        "import os, signal, sys\n"  # Rank 0 is ready for its end before the other one is started.
        + "signal.signal(signal.SIGTERM, lambda *_: (os.write(2, b'and I, rank 0, wait for ever\\n'), sys.exit(1)))\n"
        + f"{PREAMBLE}if rank == '1': {end}\n"
        + "time.sleep(1000)"
    )
    job = start("--nproc_per_node", 2, script, settings="ranks.LISTEN_SECONDS = ranks.FAILURE_GRACE_SECONDS = 600")
    lines = job.end().splitlines()
    assert job.process.returncode == code
    assert any(f"local rank 1 ended with {how}; stopping the others" in line for line in lines)
    assert "and I, rank 0, wait for ever" in lines
    first = f"libai_data.launch: rank 1 (local rank 1) failed first, with {how}"
    assert f"{first}; the end of what it wrote:" in lines or not last_line
    assert lines[-1] == (last_line or f"{first}, and wrote nothing")


def test_ranks_that_stopped_when_they_were_told_to_did_not_fail(script: Path) -> None:
    script.write_text(PREAMBLE + f"sys.exit({launcher.STOPPED})")
    result = run("--nproc_per_node", 2, script)
    assert result.returncode == 85
    assert result.stderr == ""


def test_a_folder_of_logs_whose_path_is_not_utf_8_is_refused_before_oneflow_fails(script: Path, tmp_path: Path) -> None:
    script.write_text("")
    folder = os.fsdecode(bytes(tmp_path) + b"/\xff")
    result = run("--logdir", folder, script)
    assert result.returncode == 1
    assert "/\\udcff/local_rank_0', because the path is not UTF-8; give --logdir another folder" in result.stderr
    assert run("--logdir", tmp_path, script).returncode == 0


def test_when_rank_0_fails_at_once_the_others_are_not_started(script: Path, start: StartJob) -> None:
    script.write_text("import os, sys\nprint('rank', os.environ['RANK'])\nsys.exit(3)")
    job = start("--nproc_per_node", 4, script, settings="ranks.LISTEN_SECONDS = 600")
    lines = job.end().splitlines()
    assert job.process.returncode == 3
    assert [line for line in lines if not line.startswith("libai_data.launch: ")] == ["rank 0"]


def test_a_rank_that_ignores_sigterm_is_killed_after_a_while(script: Path, start: StartJob) -> None:
    script.write_text(
        PREAMBLE + "if rank == '1': sys.exit(5)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)"
    )
    job = start("--nproc_per_node", 2, script, settings="ranks.FAILURE_GRACE_SECONDS = 0.2")
    job.end()
    assert job.process.returncode == 5


def test_ranks_that_do_not_end_after_a_signal_are_killed_after_the_grace(script: Path, start: StartJob) -> None:
    script.write_text(PREAMBLE + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('ready')\ntime.sleep(1000)")
    job = start("--nproc_per_node", 2, "--stop_grace_seconds", "0.2", script)
    job.wait_for("ready", 2)
    job.process.send_signal(signal.SIGTERM)
    job.end()
    assert job.process.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank_once(script: Path, start: StartJob, signum: signal.Signals) -> None:
    script.write_text(
        PREAMBLE
        + f"signal.pthread_sigmask(signal.SIG_BLOCK, [{int(signum)}])\nsay('ready')\n"
        + f"signal.sigwait([{int(signum)}])\nsay('got', rank)\n"
        + f"assert signal.sigtimedwait([{int(signum)}], 0.3) is None\n"
    )
    job = start("--nproc_per_node", 2, script)
    job.wait_for("ready", 2)
    job.process.send_signal(signum)
    assert sorted(re.findall(r"got \d", job.end())) == ["got 0", "got 1"]
    assert job.process.returncode == 0


def test_a_second_sigint_kills_ranks_that_do_not_end(script: Path, start: StartJob) -> None:
    script.write_text(
        PREAMBLE + "signal.signal(signal.SIGINT, lambda *_: say('asked'))\nsay('ready')\n" + "while True: time.sleep(1)"
    )
    job = start("--nproc_per_node", 2, script)
    job.wait_for("ready", 2)
    job.process.send_signal(signal.SIGINT)
    job.wait_for("asked", 2)
    job.process.send_signal(signal.SIGINT)
    job.end()
    assert job.process.returncode == 128 + signal.SIGKILL


def test_ranks_end_when_the_launcher_is_killed(script: Path, start: StartJob) -> None:
    script.write_text(PREAMBLE + "say('ready')\ntime.sleep(1000)")
    job = start("--nproc_per_node", 2, script)
    job.wait_for("ready", 2)
    job.process.kill()
    job.end()


def test_what_a_rank_started_ends_with_the_job(script: Path, start: StartJob) -> None:
    script.write_text(PREAMBLE + "subprocess.Popen(['sleep', '1000'])\nsys.exit(4 if rank == '1' else 0)")
    job = start("--nproc_per_node", 2, script)
    job.end()
    assert job.process.returncode == 4


@pytest.mark.parametrize("end", ["sys.exit(4)", "os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(1000)"])
def test_shared_memory_that_a_rank_left_is_removed_by_its_tracker(end: str, script: Path, start: StartJob) -> None:
    script.write_text(
        PREAMBLE
        + "from multiprocessing import shared_memory\n"
        + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + "open(__file__ + rank, 'w').write(shared_memory.SharedMemory(create=True, size=4096).name)\n"
        # A fork that holds the tracker's pipe, as a worker does, until it is killed.
        + "if not os.fork(): time.sleep(1000); os._exit(0)\n"
        + "size = lambda of_rank: os.path.exists(__file__ + of_rank) and os.path.getsize(__file__ + of_rank)\n"
        + "while not (size('0') and size('1')): time.sleep(0.01)\n"
        + f"if rank == '1': {end}\n"
        + "sys.exit(5)"
    )
    start(
        *("--nproc_per_node", 2, script),
        settings="ranks.FAILURE_GRACE_SECONDS = signals._SECONDS_TO_END = 0.2; signals._SECONDS_TO_CLEAN_UP = 60",
    ).end()
    left = [Path(f"{script}{rank}").read_text().lstrip("/") for rank in range(2)]
    assert all(left)
    assert [name for name in left if Path("/dev/shm", name).exists()] == []


def test_modules_are_started_too() -> None:
    assert "usage" in run("-m", "json.tool", "--help").stdout


def test_ranks_of_a_second_node_wait_for_rank_0_of_the_first(script: Path, start: StartJob) -> None:
    script.write_text("import os\nprint('rank', os.environ['RANK'], os.environ['WORLD_SIZE'])")
    port = launcher.free_port()
    flags = ["--nnodes", 2, "--node_rank", 1, "--master_addr", "127.0.0.1", "--master_port", port]
    # Two machines would need two network namespaces.
    job = start(*flags, script, settings="ranks.refuse_one_machine = lambda *_: None")
    with pytest.raises(subprocess.TimeoutExpired):
        job.process.wait(0.5)
    with socket.create_server(("127.0.0.1", port)):
        assert job.end() == "rank 1 2\n"


def test_a_launcher_of_several_says_at_once_for_which_machines_its_ranks_wait(script: Path, start: StartJob) -> None:
    script.write_text(
        "import time\nfrom libai_data.launch.joining_pipe import WAITS, tell_launcher\n"
        "tell_launcher(WAITS)\ntime.sleep(1000)"
    )
    flags = ["--nnodes", 2, "--node_rank", 0, "--master_addr", "127.0.0.1", "--master_port", launcher.free_port()]
    settings = (
        "ranks.refuse_one_machine = lambda *_: None; ranks.SECONDS_UNTIL_TOLD = 0.1; "
        "ranks.machines_connected_to = lambda port: ['10.0.0.2']"
    )
    job = start(*flags, script, settings=settings)
    job.wait_for(
        "libai_data.launch: local rank 0 waits in 'import oneflow' for ranks of the other 1 machine(s); connected so "
        "far: 10.0.0.2. Each machine needs a launcher that runs, with the same --master_addr and --master_port; "
        "LIBAI_DATA_SECONDS_TO_JOIN sets how long to wait",
        1,
    )
    job.process.terminate()
    job.end()


def test_a_script_that_never_listens_runs_after_a_while(script: Path, start: StartJob) -> None:
    script.write_text(
        "import os, pathlib, time\nos.write(1, b'here\\n')\nplace = pathlib.Path(__file__)\n"
        "place.with_name(os.environ['RANK']).touch()\n"
        "while not place.with_name('1').exists(): time.sleep(0.01)"
    )
    job = start("--nproc_per_node", 2, script, settings="ranks.LISTEN_SECONDS = 0.3")
    job.wait_for("here", 2)
    job.end()
    assert job.process.returncode == 0


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_terminal_stays_one_for_the_ranks(stream: str, script: Path) -> None:
    """So that a live progress bar is one."""
    place = f"sys.{stream}.fileno()"
    told = f"f'{{os.isatty({place})}} {{os.get_terminal_size({place}).columns}}\\n'"
    script.write_text(PREAMBLE + f"sys.{stream}.write({told})")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 123, 0, 0))
    command = [sys.executable, "-m", "libai_data.launch", str(script)]
    with subprocess.Popen(command, cwd=REPOSITORY, **{stream: theirs}) as process:  # type: ignore[call-overload]
        os.close(theirs)
        assert os.read(ours, 1000) == b"True 123\r\n"
    os.close(ours)
    assert process.returncode == 0


@pytest.mark.parametrize(("given", "seen"), [(None, "1800"), ("7", "7")])
def test_a_collective_waits_for_half_an_hour_unless_the_user_says_otherwise(
    given: str | None, seen: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONEFLOW_TIMEOUT_SECONDS", raising=False)
    if given is not None:
        monkeypatch.setenv("ONEFLOW_TIMEOUT_SECONDS", given)
    script.write_text("import os\nprint(os.environ['ONEFLOW_TIMEOUT_SECONDS'])")
    assert run(script).stdout == f"{seen}\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "local rank 1 ended with exit code 0, at least 0.1 s ago; the others still run"),
        (
            "os.kill(os.getpid(), signal.SIGSTOP)",
            "local rank 1 is stopped, and other ranks may wait for it; to continue it: kill -CONT ",
        ),
    ],
)
def test_a_rank_that_the_others_may_miss_is_named(body: str, message: str, script: Path, start: StartJob) -> None:
    script.write_text(PREAMBLE + f"if rank == '0':\n    time.sleep(1000)\n{body}\n")
    job = start("--nproc_per_node", 2, script, settings="ranks.SECONDS_UNTIL_TOLD = 0.1")
    assert job.process.stdout is not None
    assert any(message in line for line in job.process.stdout)


def test_a_failure_names_the_ranks_that_had_ended_without_one(script: Path) -> None:
    script.write_text(
        PREAMBLE
        + """
if rank == "1":
    to_rank_0 = socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    to_rank_0.send(str(os.getpid()).encode())
    sys.exit()
while True:
    connection = server.accept()[0]  # The launcher connects too.
    pid = connection.recv(100).decode()
    while pid:
        try:
            has_ended = " Z " in open(f"/proc/{pid}/stat").read()
        except OSError:
            has_ended = True
        if has_ended:
            os.abort()
        time.sleep(0.01)
"""
    )
    result = run("--nproc_per_node", 2, script)
    said = "local rank 0 ended with signal SIGABRT; stopping the others (local rank 1 ended with exit code 0 before)"
    assert said in result.stderr
