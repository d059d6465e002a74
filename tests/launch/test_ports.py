"""Two jobs never share a port, and two nodes never one machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from libai_data.errors import ConfigError
from libai_data.launch import ports
from libai_data.launch.ports import free_port, listen, machines_connected_to, refuse_one_machine, reserve_port
from tests.deadline import run_to_end
from tests.pipes import next_line

LAUNCH = [sys.executable, "-m", "libai_data.launch"]


def test_a_port_is_one_launchers_until_it_ends() -> None:
    port = free_port()
    with reserve_port(port):
        with pytest.raises(ConfigError, match=f"port {port} is in use on this machine, by another job's launcher"):
            reserve_port(port)
        listen(port).close()  # for rank 0 itself
    reserve_port(port).close()


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_port_that_any_program_listens_on_is_refused_even_if_it_would_share_it(host: str) -> None:
    with socket.socket() as other:
        # As OneFlow's server does: a second one of the same user could listen too, and get some of the ranks.
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind((host, 0))
        other.listen()
        with pytest.raises(ConfigError, match="give each job its own --master_port"):
            reserve_port(other.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_listeners_hear_ipv4_and_ipv6(host: str) -> None:
    with listen(0) as listener:
        if ":" in host and listener.family != socket.AF_INET6:
            pytest.skip("this machine has no IPv6")
        socket.create_connection((host, listener.getsockname()[1])).close()


def test_the_second_of_two_jobs_with_one_port_is_refused_before_its_ranks_start(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("print('rank here', flush=True); input()")
    port = str(free_port())
    command = [*LAUNCH, "--master_port", port, str(script)]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert next_line(first) == "rank here\n"
    second = run_to_end(command, stdin=subprocess.DEVNULL)
    assert (second.returncode, second.stdout) == (1, "")
    assert f"libai_data.launch: port {port} is in use on this machine" in second.stderr
    first.communicate("\n")
    assert first.returncode == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
@pytest.mark.parametrize("node_rank", [0, 1])
def test_two_nodes_on_one_machine_are_refused(host: str, node_rank: int) -> None:
    with pytest.raises(ConfigError, match="OneFlow computes wrong sums when two nodes run on one machine"):
        refuse_one_machine(2, node_rank, host)


def test_machines_of_their_own_are_not_refused() -> None:
    refuse_one_machine(1, 0, None)
    refuse_one_machine(2, 1, "192.0.2.1")
    with pytest.raises(ConfigError, match="--master_addr is not given"):
        refuse_one_machine(2, 0, None)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_machines_are_found_by_their_connections_to_a_port(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with listen(0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((host, port)), listener.accept()[0]:
            assert machines_connected_to(port) == []
            # As if the other end were on another machine.
            monkeypatch.setattr(ports, "_is_of_this_machine", lambda address: False)
            assert machines_connected_to(port) == [host]
            with listen(0) as other:
                assert machines_connected_to(other.getsockname()[1]) == []
