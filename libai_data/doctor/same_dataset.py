"""Whether all ranks that read have the same dataset."""

from __future__ import annotations

from libai_data.doctor.examined import Examined
from libai_data.doctor.findings import OK, RED, Facts, Finding, Reports
from libai_data.engine.agreement import differences
from libai_data.loader.fingerprint import fingerprint_with_samples

NAME = "dataset"

_SAMPLES = 4


def examine(examined: Examined) -> Facts:
    """Length and fingerprint, with a hash of some samples, where this rank reads and the loader has a dataset."""
    if not examined.reads or not hasattr(examined.dataset, "__len__"):
        return {}
    length = len(examined.dataset)
    fingerprint = fingerprint_with_samples(examined.dataset, min(_SAMPLES, length))
    fingerprint[f"hash of {min(_SAMPLES, length)} samples"] = fingerprint.pop("samples", "")
    return {"values": {"length": f"{length:,}", **{name: str(value) for name, value in fingerprint.items()}}}


def judge(reports: Reports) -> list[Finding]:
    """Name the ranks that differ."""
    values = {rank: each["values"] for rank, each in reports.facts(NAME).items()}
    found = differences(values)
    if found:
        advice = "copy the data to all nodes anew, or let one rank read for all: dataloader.train.readers=rank0"
        return [Finding(RED, "; ".join(found), advice)]
    return [
        Finding(OK, f"{', '.join(f'{name} {value}' for name, value in each.items())}; {len(values)} rank(s) read")
        for each in list(values.values())[:1]
    ]
