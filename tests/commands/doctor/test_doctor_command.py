"""`libai-data doctor` on real processes: it finds what is planted, names the rank, and never hangs."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from libai_data.commands.doctor import main
from libai_data.commands.doctor.rank import JobRank
from libai_data.errors import ConfigError
from libai_data.launch.job_environment import SECRET_VARIABLE
from libai_data.launch.launcher import free_port
from tests.commands.doctor.data import SICK
from tests.deadline import run_to_end, stretched
from tests.distributed.jobs import Ended, Job
from tests.distributed.namespaces import two_nodes, why_not
from tests.distributed.processes import REPOSITORY, ranks_environment

CONFIG = str(Path(__file__).with_name("doctor_config.py"))
DOCTOR = [sys.executable, "-m", "libai_data", "doctor", CONFIG]


def rank_of(rank: int, world_size: int, port: int, host: str = "127.0.0.1", local_rank: int = -1) -> dict[str, str]:
    place = rank if local_rank < 0 else local_rank
    return {
        **ranks_environment(),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "LOCAL_RANK": str(place),
        SECRET_VARIABLE: f"of the job at {port}",
    }


def look_at(
    ranks: Sequence[Mapping[str, str] | None], arguments: Sequence[Sequence[str]] = (), seconds: float = 20
) -> Ended:
    """Start ranks by hand, each with more environment; None is never started."""
    port = free_port()
    with Job() as job:
        for rank, more in enumerate(ranks):
            if more is not None:
                own = list(arguments[rank]) if arguments else []
                job.start(
                    [*DOCTOR, *own, "--seconds", str(stretched(seconds))], {**rank_of(rank, len(ranks), port), **more}
                )
        return job.wait(60)


@pytest.mark.slow
def test_four_sound_ranks_are_found_sound_by_one_command() -> None:
    ended = run_to_end([*DOCTOR, "train.dist.tensor_parallel_size=2", "--ranks", "4"], env=ranks_environment())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for line in (
        "master ok all 4 ranks reach 127.0.0.1",
        "mesh ok data 2 x tensor 2 x pipeline 1 on 1 node(s) of 4",
        "dataset ok length 40, name Numbers, content the one, hash of 4 samples ",
        "; 4 rank(s) read",
        "0 red, ",
        " warning(s); 4 rank(s) in ",
    ):
        assert line in " ".join(ended.stdout.split()), ended.stdout
    # How fast a rank reads depends on what else the machine does.
    storage = r"^storage +(ok +one process reads|warning +rank \d reads) "
    assert re.search(storage, ended.stdout, re.MULTILINE), ended.stdout
    assert not re.search("oneflow.*not found|Traceback", ended.stderr)


def test_each_sick_rank_is_named_in_one_table() -> None:
    ended = look_at([{}, {SICK: "slow"}, {SICK: "another"}, {SICK: "broken"}], [[], ["train.seed=7"], [], []])
    assert ended.codes == [1] * 4, ended.output
    table = ended.outputs[0]
    assert re.search(r"^config +RED +train\.seed is \d+ on rank 0 2-3, but 7 on rank 1$", table, re.MULTILINE), table
    assert re.search(r"dataset +RED +fails on rank 3: ConfigError: .*OSError: .* is not on this node", table), table
    assert re.search(r"dataset +RED +content is the one on rank 0-1, but another on rank 2$", table, re.MULTILINE), (
        table
    )
    # Others may read as slowly, as much as the machine has else to do.
    assert re.search(r"storage +warning +rank (0-\d|1[-\d ]*) reads \d+ samples/s, but [\d,]+ samples/s are", table)
    assert re.search(r"^RED config: copy the same config files to all nodes", table, re.MULTILINE), table
    assert "3 red, 1 warning(s); 4 rank(s) in " in table
    assert not any("Traceback" in output for output in ended.outputs)


@pytest.mark.slow
def test_a_rank_that_never_comes_and_one_that_is_stuck_are_told_apart() -> None:
    ended = look_at([{}, {SICK: "stuck"}, None, {}], seconds=6)
    table = ended.outputs[0]
    assert re.search(r"master +RED +rank 2 did not reach 127\.0\.0\.1, port \d+", table), table
    assert re.search(r"master +RED +reached rank 0, but did not finish 'dataset' on rank 1", table), table
    assert set(ended.codes) == {1}


@pytest.mark.parametrize(
    ("host", "cause"),
    [
        ("127.0.0.1", "no program listens there; was rank 0 started, with the same MASTER_ADDR and MASTER_PORT?"),
        ("no-such-host.invalid", "this machine cannot resolve the name"),
    ],
)
def test_a_rank_that_cannot_reach_rank_0_says_why_and_ends(host: str, cause: str) -> None:
    port = free_port()
    ended = run_to_end([*DOCTOR, "--seconds", "1"], env=rank_of(1, 2, port, host))
    assert ended.returncode == 1
    assert f"libai-data doctor: rank 1 cannot reach rank 0 at {host}, port {port}, within 1 s: {cause}" in ended.stderr


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("10.0.0..1", 12345, "MASTER_ADDR is '10.0.0..1', which is no address and no name of a machine"),
        ("127.0.0.1", 65536, "MASTER_PORT is '65536' although WORLD_SIZE is 2; "),
    ],
)
def test_an_impossible_address_is_refused(host: str, port: int, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        JobRank.of(rank_of(1, 2, port, host))


def test_a_rank_that_reaches_a_program_without_an_answer_says_where() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        ended = run_to_end([*DOCTOR, "--seconds", "1"], env=rank_of(1, 2, port))
    assert ended.returncode == 1
    assert f"rank 1 reaches 127.0.0.1, port {port}, but the program that listens there does not answer" in ended.stderr


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_to_end(DOCTOR, env=rank_of(0, 2, port))
    assert ended.returncode == 1
    assert f"rank 0 cannot listen on port {port}: Address already in use; choose another MASTER_PORT" in ended.stderr


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_on_two_nodes_a_tensor_group_that_spans_them_is_warned_of() -> None:
    port = str(free_port())
    with two_nodes() as nodes, Job() as job:
        for number, node in enumerate(nodes):
            launch = [sys.executable, "-m", "libai_data.launch", "--nproc_per_node", "2", "--nnodes", "2"]
            launch += ["--node_rank", str(number), "--master_addr", nodes[0].address, "--master_port", port]
            script = [
                str(REPOSITORY / "tools" / "doctor.py"),
                "--config-file",
                CONFIG,
                "train.dist.tensor_parallel_size=4",
            ]
            job.start(node.command(*launch, *script), ranks_environment())
        ended = job.wait(60)
    assert ended.codes == [0, 0], ended.output
    table = " ".join(ended.output.split())
    assert "mesh warning 1 tensor-parallel group(s) span nodes, such as ranks 0 to 3 on nodes 0 to 1" in table
    assert f"master ok all 4 ranks reach {nodes[0].address}" in table
    assert "master warning the ranks share no secret" in table  # of two launchers, neither can tell the other
    assert "warning mesh: Let train.dist.tensor_parallel_size (4) divide the 2 ranks of a node" in table
    assert not ended.left


def test_a_rank_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "one")
    assert main([CONFIG]) == 1
    assert "RANK is 'one' although WORLD_SIZE is 2" in capsys.readouterr().err
