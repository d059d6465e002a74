"""The command `libai-data doctor`: checks every rank of a job before it starts, and shows what to correct.

    libai-data doctor CONFIG --ranks 4                               on one machine
    libai-data launch --nnodes 2 ... -m libai_data doctor CONFIG     on several machines: run it on each
    NODE=2 NODE_RANK=0 ADDR=... bash tools/train.sh tools/doctor.py CONFIG 8

The ranks do not join OneFlow's job. They connect to rank 0 over TCP, at the job's address, with a time limit.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Callable

from libai_data.commands.console import print_lines
from libai_data.commands.doctor.checks import CHECKS
from libai_data.commands.doctor.meeting import MASTER, Meeting, answer_until_dismissed, call_rank0, judge_meeting
from libai_data.commands.doctor.rank import Examined, JobRank
from libai_data.commands.doctor.reports import RED, WARNING, Facts, Finding, Reports, table
from libai_data.errors import error_text, numbers_in_words, ranks_by_value
from libai_data.launch import launcher
from libai_data.loader.worker import forget_job
from libai_data.mesh.peers.links import send_head

_SECONDS = 60.0
_PROBLEM = "problem"
_SECONDS_FOR_THE_REST = 15.0  # time limit of rank 0's requests and the table, after the connections and checks


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="libai-data doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("words", nargs="*", metavar="CONFIG key=value", help="config file, and changes to it")
    arguments.add_argument("--config-file", metavar="FILE", help="the config, as tools/train.sh gives it")
    arguments.add_argument("--ranks", type=int, metavar="N", help="ranks to start on this machine (default: 1)")
    arguments.add_argument(
        "--seconds",
        type=float,
        default=_SECONDS,
        help="time limit for all ranks to connect and run the checks (default: %(default)s)",
    )
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, the same on all ranks: 1 if a line of the table is red."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    asked = parser().parse_intermixed_args(arguments)
    config, *overrides = ([asked.config_file] if asked.config_file else []) + asked.words or [""]
    if not config:
        parser().error("no config is given; write: libai-data doctor CONFIG")
    if not 0 < asked.seconds < 1e9:
        parser().error(f"--seconds is {asked.seconds}; it must be above 0, and below 1e9")
    if asked.ranks is not None and not 1 <= asked.ranks <= launcher.MOST_RANKS_PER_NODE:
        parser().error(f"--ranks is {asked.ranks}; it must be 1 to {launcher.MOST_RANKS_PER_NODE}")
    if asked.ranks is not None and "WORLD_SIZE" not in os.environ:
        started = ["--nproc_per_node", str(asked.ranks), "-m", "libai_data", "doctor", config, *overrides]
        return launcher.main([*started, "--seconds", str(asked.seconds)])
    codes: list[int] = []
    failed = print_lines("doctor", lambda: _examined(config, overrides, asked.seconds, codes))
    return failed or codes[0]


def _examined(config: str, overrides: Sequence[str], seconds: float, codes: list[int]) -> Iterator[str]:
    """Check this rank; rank 0 yields the table of all ranks. The exit code is appended to `codes`."""
    start = time.monotonic()
    job = JobRank.of(os.environ)
    forget_job()
    examined = Examined(job, config, overrides)
    begun, total_seconds = ["its start"], seconds + min(seconds, _SECONDS_FOR_THE_REST)
    watchdog = threading.Timer(total_seconds, _give_up, (job.rank, seconds, begun))
    watchdog.daemon = True
    watchdog.start()
    if job.rank > 0:
        link = call_rank0(job, seconds)

        def about_to(name: str) -> None:
            begun.append(name)
            send_head(link, {"at": name})

        send_head(link, {"report": examine_all(examined, about_to)})
        codes.append(answer_until_dismissed(link, job, total_seconds))
        watchdog.cancel()
        return
    meeting = Meeting(job, seconds) if job.world_size > 1 else None
    own = examine_all(examined, begun.append)
    lines = _lines(job, own, meeting)
    watchdog.cancel()
    yield from table(lines)
    counts = [sum(finding.state == state for _, finding in lines) for state in (RED, WARNING)]
    yield ""
    yield f"{counts[0]} red, {counts[1]} warning(s); {job.world_size} rank(s) in {time.monotonic() - start:.1f} s."
    codes.append(1 if counts[0] else 0)
    if meeting is not None:
        meeting.dismiss(codes[0])


def _lines(job: JobRank, own: dict[str, Facts], meeting: Meeting | None) -> list[tuple[str, Finding]]:
    if meeting is None:
        return judge_all(Reports(1, {0: own}))
    meeting.gather()
    told = {rank: report for rank, report in meeting.reports.items() if report is not None}
    firsts = [rank for rank, report in told.items() if report["place"]["local_rank"] == 0]
    for rank, why in meeting.unreached_ports(firsts).items():
        told[rank][MASTER] = {"unreached": why}
    reports = Reports(job.world_size, {0: own, **told})
    last_words = {rank: meeting.last_words.get(rank, "its start") for rank in meeting.links}
    reached = judge_meeting(reports, last_words, f"{job.host}, port {job.port}", job.has_secret)
    return [*((MASTER, finding) for finding in reached), *judge_all(reports)]


def _give_up(rank: int, seconds: float, begun: Sequence[str]) -> None:
    """End this process, because the checks take too long, and name the last one that has begun. Storage may never
    answer."""
    os.write(2, f"libai-data doctor: rank {rank} ends: '{begun[-1]}' was not finished within {seconds:g} s\n".encode())
    os._exit(1)


def examine_all(examined: Examined, about_to: Callable[[str], None]) -> dict[str, Facts]:
    """Run all checks on this rank; `about_to(name)` is called before each. If a check fails, its error is its fact."""
    facts: dict[str, Facts] = {}
    for check in CHECKS:
        about_to(check.name)
        try:
            facts[check.name] = check.examine(examined)
        except Exception as error:  # a user's dataset may raise anything
            facts[check.name] = {_PROBLEM: error_text(error)}
    return facts


def judge_all(reports: Reports) -> list[tuple[str, Finding]]:
    """Judge the facts of all ranks; if several checks fail with the same error, the table shows the error once."""
    found: list[tuple[str, Finding]] = []
    told: set[str] = set()
    for check in CHECKS:
        facts_by_rank = reports.facts(check.name).items()
        problems = ranks_by_value({rank: facts[_PROBLEM] for rank, facts in facts_by_rank if _PROBLEM in facts})
        for words, ranks in problems.items():
            if words not in told:
                fails = f"fails on rank {numbers_in_words(ranks)}: {words}"
                found.append((check.name, Finding(RED, fails, "the training would fail with the same error")))
        told.update(problems)
        failed = {rank for ranks in problems.values() for rank in ranks}
        sound = {rank: report for rank, report in reports.of_rank.items() if rank not in failed}
        found += [(check.name, finding) for finding in check.judge(Reports(reports.world_size, sound))]
    return found
