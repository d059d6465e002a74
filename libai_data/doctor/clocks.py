"""Whether the clocks of all ranks' machines agree."""

from __future__ import annotations

from libai_data.doctor.findings import OK, RED, WARNING, Finding, Reports

NAME = "clocks"

_SECONDS_WARNED_OF = 1.0
_SECONDS_TOO_MANY = 300.0


def judge(reports: Reports) -> list[Finding]:
    """Judge by how far each clock is ahead of rank 0's, as rank 0 has measured it."""
    offsets = {rank: float(facts["ahead"]) for rank, facts in reports.facts(NAME).items()}
    if not offsets:
        return []
    worst = max(offsets, key=lambda rank: abs(offsets[rank]))
    seconds = offsets[worst]
    found = f"rank {worst} is {abs(seconds):.3g} s {'ahead of' if seconds > 0 else 'behind'} rank 0"
    if abs(seconds) > _SECONDS_TOO_MANY:
        return [Finding(RED, found, "set the clocks by NTP (chrony): object stores refuse requests with such times")]
    if abs(seconds) > _SECONDS_WARNED_OF:
        return [Finding(WARNING, found, "set the clocks by NTP (chrony), or logs of the nodes cannot be compared")]
    return [Finding(OK, f"{found}, at most")]
