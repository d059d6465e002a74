"""What becomes of a job when nobody reads its output: a terminal after Ctrl-S, a pager, a full pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from libai_data.launch import output
from libai_data.launch.output import Output, OutputPipes
from tests.deadline import Deadline, wait_until
from tests.distributed.processes import REPOSITORY

WATCHDOG = 100.0
_GET_PIPE_SIZE = 1032  # F_GETPIPE_SZ of fcntl(2); Python 3.9 does not have it
# Writes more than any buffer holds, again and again, and says in a file how often.
LOUD = """
import os, signal, socket, sys, time
rank, folder = os.environ["RANK"], os.path.dirname(sys.argv[0])
if rank == "0":
    server = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
signal.signal(signal.SIGTERM, lambda *_: os._exit(85))
for number in range(10**9):
    os.write(1 + number % 2, (("x" * 79 + "\\n") * 1000).encode())
    with open(f"{folder}/count.tmp{rank}", "w") as file:
        file.write(str(number))
    os.replace(f"{folder}/count.tmp{rank}", f"{folder}/count{rank}")
    time.sleep(0.01)
"""


def test_a_reader_that_is_stuck_holds_up_nobody_and_learns_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    out = Output(writer)
    lines = [f"{number:09d}\n".encode() for number in range(400_000)]
    out.write(b"".join(lines[:200_000]))
    room = fcntl.fcntl(writer, _GET_PIPE_SIZE)
    wait_until(lambda: out._size == 200_000 * len(lines[0]) - room, "full pipe")
    assert not out.has_room()
    monkeypatch.setattr(output, "SECONDS_UNTIL_STUCK", 0.2)
    wait_until(out.has_room, "time for which nobody has read")
    out.write(b"".join(lines[200_000:]))
    read = b""
    while not read.endswith(lines[199_999]):
        read += os.read(reader, 1 << 16)
    assert read == b"".join(lines[:200_000])
    out.write(b"again\n")
    note = b"\nlibai_data.launch: 200000 line(s) left out: nobody read them\nagain\n"
    assert os.read(reader, 1 << 16) == note
    out.flush()
    for descriptor in (reader, writer):
        os.close(descriptor)


def test_a_closed_pipe_and_a_full_disk_lose_what_is_written_and_no_more() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for descriptor in (writer, full):
        out = Output(descriptor)
        for _ in range(10):
            out.write(b"lost\n")
        out.flush()
        assert out.has_room()
        os.close(descriptor)


def test_lines_of_writers_that_write_the_ends_of_lines_by_themselves_stay_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output, "_SECONDS_FOR_A_LINE", WATCHDOG)
    passed_on: list[tuple[str, bytes]] = []
    outputs = OutputPipes(lambda name, chunk: passed_on.append((name, chunk)))
    writers = [outputs.open("first"), outputs.open("second")]
    for piece in (b"one", b"\n", b"two\rthr", b"ee\n"):
        for writer in writers:
            os.write(writer, piece)
        outputs.pump(WATCHDOG)
    assert [chunk for _, chunk in passed_on] == [b"one\n"] * 2 + [b"two\r"] * 2 + [b"three\n"] * 2
    monkeypatch.setattr(output, "_SECONDS_FOR_A_LINE", 0.1)
    os.write(writers[0], b"a question? ")
    deadline = Deadline(WATCHDOG)
    while len(passed_on) < 7 and not deadline.has_passed:
        outputs.pump(WATCHDOG)
    os.write(writers[1], b"the last words")
    for writer in writers:
        os.close(writer)
    outputs.empty()
    assert passed_on[6:] == [("first", b"a question? "), ("second", b"the last words")]
    assert outputs.of("second") == ["one", "two", "three", "the last words"]


def launch(*arguments: object, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "libai_data.launch", *map(str, arguments)]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=REPOSITORY)


def waiting_in(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_nobody_continues_the_line_of_another_writer() -> None:
    reader, writer = os.pipe()
    out = output.Output(writer)
    for chunk, who in [(b"culprit", "1"), (b"the last\n", "0"), (b"a ques", "0"), (b"tion? ", "0"), (b"told\n", "")]:
        out.write(chunk, who)
    out.write(b"bar\r50 %", "0")
    out.write(b"\rlog\n", "1")
    out.flush()
    assert os.read(reader, 1000) == b"culprit\nthe last\na question? \ntold\nbar\r50 %\rlog\n"
    os.close(reader)
    os.close(writer)


def test_no_rank_continues_the_line_of_another_rank_on_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    """`print` writes the end of a line by itself, which may come late on a busy machine."""
    reader, writer = os.pipe()
    monkeypatch.setattr(output, "STDOUT", Output(writer))
    monkeypatch.setattr(output, "_SECONDS_FOR_A_LINE", -1.0)
    outputs = OutputPipes()
    ranks = [outputs.open(None) for _ in range(2)]
    for rank, text in [(0, b"line of 0"), (1, b"line of 1"), (1, b"\n"), (0, b"\n")]:
        os.write(ranks[rank], text)
        outputs.pump(WATCHDOG)
    for rank in ranks:
        os.close(rank)
    outputs.empty()
    output.STDOUT.flush()
    assert os.read(reader, 1000) == b"line of 0\nline of 1\n\n"
    os.close(reader)
    os.close(writer)


def test_a_reader_that_is_slow_gets_every_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print(*range(1, 500_001), sep='\\n')")
    with launch(script) as process:
        stdout = process.stdout
        assert stdout is not None
        wait_until(lambda: waiting_in(stdout.fileno()) > 32_768, "line")
        time.sleep(1.0)
        read = stdout.read()
    assert process.returncode == 0
    assert read == b"".join(b"%d\n" % number for number in range(1, 500_001))


def count(folder: Path, rank: int) -> int:
    path = folder / f"count{rank}"
    return int(path.read_text()) if path.exists() else -1


def await_count(folder: Path, least: int, process: subprocess.Popen[bytes]) -> None:
    deadline = Deadline(WATCHDOG)
    while min(count(folder, 0), count(folder, 1)) < least:
        assert process.poll() is None
        assert not deadline.has_passed, (count(folder, 0), count(folder, 1))
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["terminal", "pipe", "hostfile"])
def test_a_job_whose_output_nobody_reads_goes_on_and_can_be_stopped(kind: str, tmp_path: Path) -> None:
    """The launcher of a hostfile stays alive for its machines, which give it up after 20 s of silence."""
    script = tmp_path / "loud.py"
    script.write_text(LOUD)
    arguments: list[object] = ["--nproc_per_node", 2, script]
    if kind == "hostfile":
        ssh, hosts = tmp_path / "ssh", tmp_path / "hosts"
        # The command is the last argument.
        ssh.write_text('#!/bin/bash\nexec bash -c "${!#}"\n')
        ssh.chmod(0o755)
        hosts.write_text("127.0.0.1\n")
        arguments = ["--hostfile", hosts, "--ssh", ssh, *arguments]
    reader, writer = pty.openpty() if kind == "terminal" else os.pipe()
    start = time.monotonic()
    process = launch(*arguments, stdout=writer)
    try:
        # Far more than fits anywhere: the ranks write on while nobody reads.
        await_count(tmp_path, 300, process)
        if kind == "hostfile":
            while time.monotonic() < start + 35.0:
                assert process.poll() is None
                time.sleep(0.1)
        before = count(tmp_path, 0)
        await_count(tmp_path, before + 20, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 85
    finally:
        process.kill()
        process.wait()
        for descriptor in (reader, writer):
            os.close(descriptor)
