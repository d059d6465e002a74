"""`tools/launch_hosts.sh`: two nodes of two ranks, with an sshd each, are started, stopped, cut apart and lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Callable, NamedTuple

import pytest

from libai_data.launch.exit_codes import STOPPED
from tests.deadline import stretched
from tests.distributed.jobs import Job, runs_of, samples_in_order
from tests.distributed.namespaces import Node, two_nodes, why_not
from tests.distributed.processes import REPOSITORY, children_of, command_of, ranks_environment
from tests.distributed.secure_shell import kill_all_on, reachable_by_ssh, wait_until_nothing_runs, why_no_sshd
from tests.properties import slowly

TRAINING = Path(__file__).parent / "scripts" / "noting_training.py"
STEPS, PERIOD = 30, 3
SECONDS_TO_END = 30.0
WATCHDOG = 110.0

reason = why_not() or why_no_sshd()
pytestmark = pytest.mark.skipif(reason is not None, reason=reason or "")

CONFIG = """
from tests.engine.tiny import tiny_config
_cfg = tiny_config({folder!r}, train_iter={steps})
_cfg.train.dist.update(tensor_parallel_size=2)
_cfg.train.checkpointer.period = {period}
_cfg.train.evaluation.enabled = False
train, graph, model, optim, dataloader = (_cfg[name] for name in ("train", "graph", "model", "optim", "dataloader"))
"""
# Programs that need no OneFlow: rank 0 listens, as OneFlow's does, so that the launchers start the others.
PLAIN = """
import os, signal, socket, sys, time
rank, folder = os.environ["RANK"], os.path.dirname(sys.argv[0])
if rank == "0":
    server = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
def say(word):
    os.write(1, f"{word} {rank}\\n".encode())
"""


class Cluster(NamedTuple):
    """Two nodes that reach each other by ssh, and a folder that both see."""

    nodes: Sequence[Node]
    ssh: str
    folder: Path

    def start(self, job: Job, script: Path, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a script on both nodes, from the first, by tools/launch_hosts.sh."""
        hosts = self.folder / "hosts"
        hosts.write_text("".join(f"{node.address} slots=2\n" for node in self.nodes))
        script_arguments = [str(script), str(self.folder / "config.py"), "2", *arguments]
        command = ["bash", str(REPOSITORY / "tools" / "launch_hosts.sh"), str(hosts), *script_arguments]
        return job.start(self.nodes[0].command(*command), {**ranks_environment(variables), "SSH": self.ssh})

    def plain(self, program: str) -> Path:
        """A script that uses no OneFlow."""
        path = self.folder / "plain.py"
        path.write_text(PLAIN + program)
        return path


@pytest.fixture()
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    keys = tmp_path / "keys"
    keys.mkdir()
    with two_nodes() as nodes, reachable_by_ssh(nodes, keys) as ssh:
        yield Cluster(nodes, ssh, tmp_path)
        assert not wait_until_nothing_runs(nodes, 30)


def await_words(job: Job, word: str, times: int) -> None:
    job.wait_for(lambda: job.outputs()[0].count(word) >= times, f"{word!r}, {times} times")


def write_config(folder: Path, steps: int) -> None:
    (folder / "config.py").write_text(CONFIG.format(folder=str(folder / "output"), steps=steps, period=PERIOD))


@pytest.mark.slow
def test_a_node_that_is_lost_is_left_out_and_the_stream_goes_on_exactly(cluster: Cluster) -> None:
    write_config(cluster.folder, STEPS)
    output = cluster.folder / "output"
    with Job() as job:
        cluster.start(job, TRAINING, MAX_RESTARTS="2", LIBAI_DATA_RESTS="0.2")
        job.wait_for((output / "last_checkpoint").exists, "checkpoint")
        kill_all_on(cluster.nodes[1])
        ended = job.wait(WATCHDOG)
    assert ended.codes == [0], ended.output
    assert "no answer from 10.77.0.2; continues with 1 of 2 machines: 10.77.0.1" in ended.output
    assert re.search(r"libai_data.launch: restart 1 of 2, from checkpoint model_\d+", ended.output), ended.output
    assert "2 rank(s) on 1 node(s)" in ended.output
    before, after = runs_of(output, 0)
    other = runs_of(output, 2)[0]
    whole = samples_in_order(STEPS)
    first = min(after)
    assert 0 < first <= max(before) + 1 < STEPS
    assert first % PERIOD == 0
    assert {step: before[step] + other[step] for step in range(first)} == {step: whole[step] for step in range(first)}
    assert after == runs_of(output, 1)[1] == {step: whole[step] for step in range(first, STEPS)}


@pytest.mark.slow
def test_a_link_that_is_cut_ends_both_sides_with_a_message_that_says_so(cluster: Cluster) -> None:
    """Of a training, whose ranks notice by themselves, and of a program that does not speak with its peers."""
    write_config(cluster.folder, 10000)
    with Job() as job, Job() as silent:
        cluster.start(job, TRAINING, LIBAI_DATA_RESTS="0.05", PORT="12345")
        cluster.start(silent, cluster.plain("say('ready')\ntime.sleep(1000)\n"), PORT="12346")
        await_words(silent, "ready", 4)
        await_words(job, "iteration 4/", 1)
        cluster.nodes[1].run("ip", "link", "set", "veth0", "down")
        cut = time.monotonic()
        ended = [each.wait(SECONDS_TO_END + 5) for each in (job, silent)]
        assert not wait_until_nothing_runs(cluster.nodes, SECONDS_TO_END + 5)
        print(f"both sides ended {time.monotonic() - cut:.1f} s after the link was cut")
        assert time.monotonic() - cut < stretched(SECONDS_TO_END + 5)
    assert all(each.codes[0] not in (0, STOPPED) for each in ended), ended
    told = (
        "rank 2 of node 1, or the network to it, is gone",
        "10.77.0.2 cannot be reached, or the ssh connection was lost",
    )
    assert any(words in ended[0].output for words in told), ended[0].output
    assert told[1] in ended[1].output, ended[1].output


@pytest.mark.parametrize("speaks_last", [2, slowly(0)])
def test_a_rank_that_fails_ends_all_with_its_code_and_its_error_last(cluster: Cluster, speaks_last: int) -> None:
    script = cluster.plain(
        f"late = rank == '{speaks_last}'\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(late), say('told'), sys.exit(1)))\n"
        "open(f'{folder}/ready{rank}', 'w').close()\n"
        "while rank == '3' and not all(os.path.exists(f'{folder}/ready{each}') for each in range(3)):\n"
        "    time.sleep(0.01)\n"
        "if rank == '3':\n"
        "    sys.stderr.write('the culprit speaks\\n')\n"
        "    sys.exit(7)\n"
        "time.sleep(1000)\n"
    )
    with Job() as job:
        cluster.start(job, script)
        ended = job.wait(WATCHDOG)
    assert ended.codes == [7], ended.output
    assert "[10.77.0.1] told 0" in ended.output
    assert "[10.77.0.2] libai_data.launch: local rank 1 ended with exit code 7; stopping the others" in ended.output
    # The node says it again behind its own ranks, and the launcher where another node has spoken since.
    last = re.split(r"failed first.*; the end of what it wrote:\n", ended.output)[-1].rstrip("\n")
    assert re.search(r"  \| .*the culprit speaks$", last, re.MULTILINE), ended.output
    assert not re.search(r"^(?!(\[10\.77\.0\.2\] )?  \| )", last, re.MULTILINE), ended.output


@pytest.mark.slow
def test_a_machine_whose_ranks_end_well_before_they_import_oneflow_ends_all_and_is_named(cluster: Cluster) -> None:
    script = cluster.folder / "leaves.py"
    script.write_text("import os, libai_data\nif os.environ['RANK'] in '01':\n    import oneflow\n")
    with Job() as job:
        cluster.start(job, script)
        ended = job.wait(WATCHDOG)
    assert ended.codes == [1], ended.output
    assert "local rank 0-1 waits in 'import oneflow' for 10.77.0.2, whose ranks ended with exit code 0" in ended.output
    assert "cannot be reached" not in ended.output


def interrupt(job: Job) -> None:
    job.processes[0].send_signal(signal.SIGINT)


def save_and_stop(job: Job) -> None:
    job.processes[0].send_signal(signal.SIGUSR1)


def ssh_processes(job: Job) -> list[int]:
    return [pid for pid in children_of(job.processes[0].pid) if command_of(pid).startswith(b"ssh")]


def kill_one_ssh(job: Job) -> None:
    processes = ssh_processes(job)
    assert len(processes) == 2
    os.kill(max(processes), signal.SIGKILL)


def kill_the_launcher(job: Job) -> None:
    job.processes[0].kill()


@pytest.mark.parametrize(
    ("happens", "code"),
    [slowly(interrupt, 130), (save_and_stop, STOPPED), (kill_one_ssh, 128 + 9), (kill_the_launcher, -9)],
)
def test_no_process_is_left_on_any_node_whatever_ends_the_job(
    happens: Callable[[Job], None], code: int, cluster: Cluster
) -> None:
    told = code in (130, STOPPED)
    script = cluster.plain(
        # Once one rank has ended with a code that is not 0, the others get SIGTERM as well, and may before they answer.
        f"signal.signal(signal.SIGTERM, signal.{'SIG_IGN' if told else 'SIG_DFL'})\n"
        "def stop(signum, frame):\n"
        "    say(f'got {signum}')\n"
        f"    os._exit({STOPPED} if signum == signal.SIGUSR1 else 130)\n"
        "for signum in (signal.SIGINT, signal.SIGUSR1):\n"
        "    signal.signal(signum, stop)\n"
        "say('ready')\n"
        "time.sleep(1000)\n"
    )
    with Job() as job:
        process = cluster.start(job, script)
        await_words(job, "ready", 4)
        happens(job)
        assert process.wait(WATCHDOG) == code, job.outputs()[0]
        # Well before stdin would count as silent.
        assert not wait_until_nothing_runs(cluster.nodes, 10)
        output = job.outputs()[0]
    if happens is kill_one_ssh:
        assert re.search(r"10\.77\.0\.\d: ended with signal SIGKILL; stopping the other machines", output)
    if told:
        assert sorted(re.findall(r"got \d+ (\d)", output)) == ["0", "1", "2", "3"]


def test_a_machine_that_cannot_be_reached_is_named(cluster: Cluster) -> None:
    kill_all_on(cluster.nodes[1])
    with Job() as job:
        cluster.start(job, cluster.plain("time.sleep(1000)\n"))
        ended = job.wait(WATCHDOG)
    assert ended.codes == [255]
    assert "10.77.0.2 cannot be reached, or the ssh connection was lost (exit code 255)" in ended.output
    assert "10.77.0.2: ended with exit code 255; stopping the other machines" in ended.output


def test_what_takes_an_ssh_to_try_is_tried_before(tmp_path: Path) -> None:
    usage = subprocess.run(
        ["bash", str(REPOSITORY / "tools" / "launch_hosts.sh"), "hosts", "file.py"], capture_output=True, text=True
    )
    assert usage.returncode == 2
    assert "HOSTFILE FILE CONFIG GPUS" in usage.stderr
    wrong = [sys.executable, "-m", "libai_data.launch", "--hostfile", str(tmp_path / "none"), "-m", "anything"]
    ended = subprocess.run(wrong, capture_output=True, text=True, cwd=REPOSITORY, env=ranks_environment())
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"libai_data.launch: --hostfile {tmp_path}/none cannot be read")
