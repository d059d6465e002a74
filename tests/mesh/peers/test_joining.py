"""A rank whose peers never start ends, although OneFlow waits for them inside its import."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Callable

import pytest

from libai_data.errors import ConfigError, MeshError
from libai_data.launch.job_environment import SECONDS_TO_JOIN_VARIABLE, SECRET_VARIABLE, seconds_to_join
from libai_data.launch.launcher import free_port
from libai_data.launch.ports import listen, reserve_port
from libai_data.mesh.peers import liveness
from libai_data.mesh.peers.links import SECONDS_TO_MEET_VARIABLE, seconds_to_meet
from tests.deadline import printed_by, run_to_end
from tests.distributed.namespaces import Node, two_nodes, why_not
from tests.distributed.processes import ranks_environment
from tests.properties import slowly


def alone_of_two(rank: int, seconds: str) -> dict[str, str]:
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "RANK": str(rank)}
    return ranks_environment({**job, "LOCAL_RANK": str(rank), SECONDS_TO_JOIN_VARIABLE: seconds})


def ended_import(environment: dict[str, str], repository: Path, *words: str) -> str:
    """What a rank tells of its end that does nothing but import OneFlow; `words` precede its command."""
    command = [*words, sys.executable, "-c", "import libai_data, oneflow"]
    ended = run_to_end(command, env={**environment, "PYTHONPATH": str(repository)})
    assert ended.returncode != 0
    return ended.stderr


@pytest.mark.parametrize("rank", [1, slowly(0)])
def test_a_rank_whose_peer_is_never_started_ends_and_says_so(rank: int, repository: Path) -> None:
    told = ended_import(alone_of_two(rank, "1"), repository)
    assert f"rank {rank} ends: the 2 ranks have not all started within 1 s; were all of them started" in told


def test_rank_0_does_not_share_its_port_with_another_job(repository: Path) -> None:
    environment = alone_of_two(0, "600")
    port = environment["MASTER_PORT"]
    with listen(int(port)):
        assert f"ConfigError: port {port} is in use on this machine, by another program" in ended_import(
            environment, repository
        )
    # Nor with one that has not come to listen.
    with reserve_port(int(port), "rank 0"):
        assert f"ConfigError: port {port} is in use on this machine, by another job's rank 0" in ended_import(
            environment, repository
        )


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [
        *(("WORLD_SIZE", value, 2**31 - 1) for value in ("", "x", "0", "-1", "1.0", "²", "2147483648", "9" * 30)),
        *(("RANK", value, 1) for value in ("-1", "2", "99999999999")),
        ("LOCAL_RANK", "x", 1),
        *(("MASTER_PORT", value, 2**16 - 1) for value in ("0", "-1", "65536")),
    ],
)
def test_a_variable_of_the_job_that_oneflow_cannot_use_is_named_before_it_joins(
    name: str, value: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each, right in {**alone_of_two(0, "1"), name: value}.items():
        monkeypatch.setenv(each, right)
    message = rf"^{name} is '{value}'.* set {name} to a number from [01] to {most}$"
    with pytest.raises(ConfigError, match=message), liveness.joining():
        raise AssertionError("it joined")


@pytest.mark.parametrize("names", [["MASTER_ADDR"], ["MASTER_PORT"], ["RANK"], ["MASTER_ADDR", "MASTER_PORT"]])
def test_ranks_of_a_job_do_not_each_run_alone_because_a_variable_is_missing(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in alone_of_two(0, "1").items():
        monkeypatch.setenv(name, value)
    for name in names:
        monkeypatch.delenv(name)
    message = f"WORLD_SIZE is 2, but the environment has no {' and no '.join(names)},"
    with pytest.raises(ConfigError, match=message), liveness.joining():
        raise AssertionError("it runs alone")


def test_a_process_that_inherits_the_variables_of_one_that_was_no_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "1", "RANK": "-1", "LOCAL_RANK": "0"}
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    with liveness.joining():
        pass


RANK_OF_TWO_JOBS = """
import os, sys, time
from pathlib import Path
import libai_data
from libai_data.launch.ports import process_with_port
job, rank, go = sys.argv[1], os.environ["RANK"], Path(sys.argv[2])
port = int(os.environ["MASTER_PORT"])
while job == "second" and process_with_port(port, "rank 0") is None:
    time.sleep(0.01)
while job == "first" and rank == "1" and not go.exists():
    time.sleep(0.01)
import oneflow
libai_data.synchronize()
print(f"rank {rank} of the {job} job done", flush=True)
"""


def test_ranks_of_a_second_job_with_the_same_port_do_not_join_the_first_one(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK_OF_TWO_JOBS)
    port, environment = str(free_port()), {**os.environ, "PYTHONPATH": str(repository)}
    # Not a session of its own: then this launcher ends no other rank when one has failed.
    launch = [sys.executable, "-m", "oneflow.distributed.launch", "--nproc_per_node", "2", "--master_port", port]
    jobs = [
        subprocess.Popen(
            [*launch, str(tmp_path / "rank.py"), job, str(tmp_path / "go")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for job in ("first", "second")
    ]
    try:
        told, _ = printed_by(jobs[1])  # until both of its ranks have ended
    finally:
        (tmp_path / "go").touch()
    assert jobs[1].returncode != 0
    assert f"port {port} is in use on this machine, by another job's rank 0" in told
    assert f"port {port} is in use on this machine, by rank 0 of another job (process" in told
    told, _ = printed_by(jobs[0])
    assert jobs[0].returncode == 0, told
    assert "rank 0 of the first job done" in told and "rank 1 of the first job done" in told


@pytest.mark.slow
def test_a_rank_that_was_started_by_itself_is_no_other_job(repository: Path) -> None:
    first = alone_of_two(0, "600")
    code = "import libai_data, oneflow; libai_data.synchronize(); print('met')"
    # Each by a shell of its own, as from two terminals.
    ranks = [
        subprocess.Popen(
            [
                "sh",
                "-c",
                '"$@"; exit $?',
                "sh",
                "env",
                f"RANK={rank}",
                f"LOCAL_RANK={rank}",
                sys.executable,
                "-c",
                code,
            ],
            env={**first, "PYTHONPATH": str(repository), "RANK": "", "LOCAL_RANK": ""},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 0)
    ]
    assert [printed_by(rank)[0] for rank in ranks] == ["met\n"] * 2


@pytest.mark.parametrize("module", ["oneflow._oneflow_internal", *map(slowly, ("oneflow.version", "oneflow.nn.graph"))])
def test_ctrl_c_during_the_import_raises_at_its_end(module: str, repository: Path) -> None:
    code = f"""
import importlib.abc, os, signal, sys
import libai_data
class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
try:
    import oneflow
except KeyboardInterrupt:
    print("interrupted", "oneflow.utils" in sys.modules, signal.getsignal(signal.SIGINT).__name__)
"""
    ended = run_to_end([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(repository)})
    assert (ended.returncode, ended.stdout) == (0, "interrupted True default_int_handler\n"), ended.stderr


def test_a_process_that_is_forked_while_ranks_meet_ends_nothing(repository: Path) -> None:
    code = (
        "import os; from libai_data.mesh.peers import liveness\n"
        "with liveness._ending_after(60, 'too late'):\n    pid = os.fork(); pid or os._exit(len(os.read(0, 1)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE) as process:
        assert process.wait() == 0


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan"])
@pytest.mark.parametrize(
    ("variable", "seconds"), [(SECONDS_TO_JOIN_VARIABLE, seconds_to_join), (SECONDS_TO_MEET_VARIABLE, seconds_to_meet)]
)
def test_a_time_that_is_none_is_refused(
    variable: str, seconds: Callable[[], float], value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=variable):
        seconds()


def test_ranks_wait_ten_minutes_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECONDS_TO_JOIN_VARIABLE, raising=False)
    assert seconds_to_join() == 600


def test_a_fork_of_a_rank_is_told_that_it_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    import oneflow  # noqa: F401

    monkeypatch.setattr(liveness, "_liveness", None)
    monkeypatch.setattr(liveness, "_forked", True)
    with pytest.raises(MeshError, match="was forked from a process that had imported OneFlow"):
        liveness.watch_over_ranks()


def test_a_fork_of_a_rank_ends_with_its_exit_code(repository: Path) -> None:
    code = (
        "import os; import libai_data; import oneflow\npid = os.fork()\n"
        "if not pid: raise SystemExit(3)\nraise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) + 1)"
    )
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True) as process:
        try:
            assert process.wait() == 4
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


IN_A_JOB = "import libai_data, oneflow, sys; libai_data.synchronize(); print('met', flush=True); sys.stdin.read()"


def begin_ranks(environment: dict[str, str], ranks: str, *words: str) -> list[subprocess.Popen[str]]:
    """Start ranks of a job that stay until their standard input ends, each by a command that follows `words`."""
    return [
        subprocess.Popen(
            [*words, sys.executable, "-c", IN_A_JOB],
            env={**environment, "RANK": rank, "LOCAL_RANK": rank},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]


def lines_of(ranks: list[subprocess.Popen[str]]) -> list[str]:
    return [rank.stdout.readline() for rank in ranks if rank.stdout is not None]


@pytest.mark.slow
def test_a_rank_is_told_that_rank_0_at_its_port_has_met_all_its_ranks(repository: Path) -> None:
    environment = {**alone_of_two(0, "600"), "PYTHONPATH": str(repository)}
    first = begin_ranks(environment, "01")
    try:
        assert lines_of(first) == ["met\n"] * 2
        for rank in "01":
            told = ended_import({**environment, "RANK": rank, "LOCAL_RANK": rank}, repository)
            assert f"ConfigError: rank {rank} cannot join: rank 0 of another job" in told
            assert f"uses port {environment['MASTER_PORT']} at 127.0.0.1 and has met all its ranks" in told
    finally:
        for each in first:
            assert each.stdin is not None
            each.stdin.close()
    for each in first:
        each.wait()
    assert [each.returncode for each in first] == [0, 0]


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_a_rank_of_another_machine_is_told_that_rank_0_belongs_to_another_job(repository: Path) -> None:
    with two_nodes() as (here, there):
        environment = {**alone_of_two(1, "600"), "PYTHONPATH": str(repository), "MASTER_ADDR": here.address}
        job = {**environment, SECRET_VARIABLE: "first"}
        used = f"uses port {environment['MASTER_PORT']} at {here.address} and"
        first = begin_ranks(job, "0", *here.command())
        try:
            wait_for_rank0(here, environment["MASTER_PORT"], repository)
            assert f"{used} waits for its ranks" in ended_import(environment, repository, *there.command())
            larger = {**job, "WORLD_SIZE": "4", "RANK": "2"}  # as a launcher with another --nproc_per_node sets them
            told = ended_import({**larger, SECRET_VARIABLE: ""}, repository, *there.command())
            assert "start it with equal --nproc_per_node, --nnodes and LIBAI_DATA_JOB_SECRET" in told
            assert "here, WORLD_SIZE is 4" in told
            first += begin_ranks(job, "1", *here.command())
            assert lines_of(first) == ["met\n"] * 2
            assert f"{used} has met all its ranks" in ended_import(environment, repository, *there.command())
        finally:
            for each in first:
                each.kill()
                each.communicate()


def wait_for_rank0(node: Node, port: str, repository: Path) -> None:
    code = (
        "import time; from libai_data.launch.ports import process_with_port\n"
        f"while process_with_port({port}, 'rank 0') is None: time.sleep(0.01)"
    )
    run_to_end(node.command(sys.executable, "-c", code), env={**os.environ, "PYTHONPATH": str(repository)}, check=True)
