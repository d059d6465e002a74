"""Whether each rank may open as many descriptors, and start as many threads and processes, as it will."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from libai_data.config import try_get_key
from libai_data.doctor.control_group import limit_left
from libai_data.doctor.examined import Examined
from libai_data.doctor.findings import OK, RED, Facts, Finding, Reports

NAME = "limits"

_DESCRIPTORS_OF_A_RANK = 256
_DESCRIPTORS_OF_A_WORKER = 8
_THREADS_OF_A_RANK = 64
_THREADS_OF_A_WORKER = 4


def examine(examined: Examined) -> Facts:
    """Limits of this process, and how many workers it will have."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "descriptors": None if descriptors == resource.RLIM_INFINITY else descriptors,
        "threads": threads_left(),
        "workers": int(try_get_key(examined.cfg, "dataloader.train.num_workers", default=0) or 0),
    }


def threads_left() -> int | None:
    """Threads and processes that can still be started; None without a limit."""
    left = [limit_left("pids", "pids.max", "pids.current", "pids.max", "pids.current")]
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and os.geteuid() != 0:  # which does not bind root
        # Of all users; the limit is on those of one, so that there may be more left.
        running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])
        left.append(most - running)
    return min((each for each in left if each is not None), default=None)


def judge(reports: Reports) -> list[Finding]:
    """Compare with what ranks need: OneFlow connects each rank with every other."""
    facts = reports.facts(NAME)
    if not facts:
        return []
    found: list[Finding] = []
    workers = max(each["workers"] for each in facts.values())
    needed = _DESCRIPTORS_OF_A_RANK + reports.world_size + _DESCRIPTORS_OF_A_WORKER * workers
    allowed = {rank: each["descriptors"] for rank, each in facts.items() if each["descriptors"] is not None}
    least = min(allowed, key=lambda rank: allowed[rank], default=None)
    if least is not None and allowed[least] < needed:
        words = (
            f"rank {least} may open {allowed[least]:,} descriptors; {reports.world_size} ranks need about {needed:,}"
        )
        advice = f"ulimit -n {max(65536, needed)} before the launch, or LimitNOFILE= of the service that starts it"
        found.append(Finding(RED, words, advice))
    each_rank = _THREADS_OF_A_RANK + _THREADS_OF_A_WORKER * workers
    of_node = each_rank * max(1, reports.world_size // reports.num_nodes)
    threads = {rank: each["threads"] for rank, each in facts.items() if each["threads"] is not None}
    fewest = min(threads, key=lambda rank: threads[rank], default=None)
    if fewest is not None and threads[fewest] < of_node:
        words = (
            f"the node of rank {fewest} may start {threads[fewest]:,} more threads; its ranks need about {of_node:,}"
        )
        found.append(Finding(RED, words, "raise ulimit -u, or the container's limit of processes (--pids-limit)"))
    if found:
        return found
    descriptors, processes = (
        "any number of" if least is None else f"at least {least:,}"
        for least in (min(allowed.values(), default=None), min(threads.values(), default=None))
    )
    return [Finding(OK, f"{descriptors} descriptors, {processes} threads a rank")]
