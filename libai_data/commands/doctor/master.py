"""Whether all ranks have reached rank 0, also at ports that the system chooses."""

from __future__ import annotations

from collections.abc import Mapping

from libai_data.commands.doctor.findings import OK, RED, WARNING, Finding, Reports
from libai_data.errors import by_rank, numbers_in_words
from libai_data.launch.job_identity import SECRET_VARIABLE

NAME = "master"


def judge(reports: Reports, last_words: Mapping[int, str], address: str, has_secret: bool = True) -> list[Finding]:
    """Name who is missing.

    Args:
        reports: of those that have reported.
        last_words: rank -> what it was about to look at, of those that came.
        address: of rank 0, in words.
        has_secret: whether the ranks could prove that they are of one job.
    """
    found: list[Finding] = []
    missing = [rank for rank in range(reports.world_size) if rank not in reports.of_rank]
    never = [rank for rank in missing if rank not in last_words]
    if never:
        advice = "their own output tells why; if there is none, they were not started"
        found.append(Finding(RED, f"rank {numbers_in_words(never)} did not come to {address}", advice))
    stuck = {rank: f"'{last_words[rank]}'" for rank in missing if rank in last_words}
    if stuck:
        advice = "their own output tells more; storage that does not answer looks like this too"
        found.append(Finding(RED, f"came, but did not finish with {by_rank(stuck)}", advice))
    unreached = {rank: str(facts["unreached"]) for rank, facts in reports.facts(NAME).items()}
    if unreached:
        advice = (
            "let the nodes reach each other at all ports: OneFlow, readers=rank0 and the watch over the ranks use "
            "some that the system chooses"
        )
        found.append(Finding(RED, f"a port of rank 0's that the system chose: {by_rank(unreached)}", advice))
    if not has_secret:
        advice = f"set {SECRET_VARIABLE} to the same random words on all machines, or start them with --hostfile"
        found.append(Finding(WARNING, "the ranks share no secret, so that anybody could be one of them here", advice))
    if not missing and not unreached:
        found.insert(0, Finding(OK, f"all {reports.world_size} ranks reach {address}"))
    return found
