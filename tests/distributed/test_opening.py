"""A rank that cannot open what it reads for others: all ranks get an error, none waits for it."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launcher import found_by_ranks

SCRIPT = Path(__file__).parent / "scripts" / "fail_to_open.py"


def test_a_leader_that_fails_to_open_is_an_error_on_all_ranks_and_the_next_loader_works(tmp_path: Path) -> None:
    leader, *others = found_by_ranks(SCRIPT, 4, tmp_path, timeout=100)
    exits = (
        "ConfigError: The config: calling __main__.Rows failed: SystemExit: no data here (called with fails='exits')"
    )
    assert leader["exits"] == exits
    assert "Speechless: (its message cannot be shown" in leader["cannot say why"]
    assert leader["has no link"] == leader["has no memory"] == "OSError: no room for another descriptor"
    for other in others:
        prefix = "PeerError: rank 0, which reads for others, could not"
        assert other["exits"] == f"{prefix} open the dataset: {exits}"
        assert other["cannot say why"].startswith(f"{prefix} open the dataset: ConfigError: ")
        for case in ("has no link", "has no memory"):
            assert other[case] == f"{prefix} open the link of its node: OSError: no room for another descriptor"
    for found in (leader, *others):
        sizes, fields, nothing = found["other arguments"]
        assert "arguments: batch size is 2 on rank 0-1 3, but 4 on rank 2; seed is 0 on rank 0-1 3, but 1" in sizes
        assert "fields is None on rank 0-1 3, but absent on rank 2; fields.0 is absent on rank 0-1 3, but 'x'" in fields
        assert nothing == ""
    told = [found["a state on one rank"] for found in (leader, *others)]
    assert told[0] == ["", ""]
    assert told[1][1] == told[3][1] == ""
    for rank in (1, 2, 3):
        assert (
            f"rank {rank} begins a pass at position 0, but the rank that reads for it begins at position 8: "
            in told[rank][0]
        )
    assert "rank 2 begins a pass at position 8, but the rank that reads for it begins at position 0: load" in told[2][1]
    told = [found["an epoch on one rank"] for found in (leader, *others)]
    assert told[0] == ["", ""] and told[1][1] == told[3][1] == ""
    for rank in (1, 2, 3):
        assert (
            f"rank {rank} begins a pass at position 0 of epoch 0, but the rank that reads for it begins"
            in told[rank][0]
        )
        assert "begins at position 0 of epoch 5: load the same state, and set the same epoch" in told[rank][0]
    assert "rank 2 begins a pass at position 0 of epoch 5, but the rank that reads" in told[2][1]
    assert [len(found[""]) for found in (leader, *others)] == [2] * 4
