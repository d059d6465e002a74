"""What the comparison of contents makes of the ranks' words; on real ranks it is tested in tests/distributed/."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import pytest

from libai_data.delivery import contract
from libai_data.delivery.contract import check_contract
from libai_data.delivery.gather import checksum_of
from libai_data.delivery.schema_check import signature_of
from libai_data.errors import ContractError
from libai_data.mesh.current import get_mesh, set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh
from libai_data.structures import Agreement, BatchInfo, DistTensorData, Origin, RowIndices

Rank = tuple[dict[str, np.ndarray], BatchInfo, Any, str]


def rank_of(shard: int, reads: bool = True, step: int = 3, valid: int = 4, order: str = "seed 0") -> Rank:
    """What a rank of a mesh with 2 shards of 2 rows holds."""
    indices = np.array([2 * shard, 2 * shard + 1])
    rows = RowIndices(np.zeros(2, np.int64), indices) if reads else None
    return {"x": indices * 10.0}, BatchInfo(step, 0, 4 * step, 4, valid), rows, order


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the check as rank 0 of several whose words are made here."""

    def compare(ranks: list[Rank], sizes: tuple[int, int, int] = (2, 2, 1)) -> None:
        calls = iter(range(2))

        def gather(words: np.ndarray) -> np.ndarray:
            number = next(calls)
            every = []
            for arrays, info, rows, order in ranks:
                fields = {name: DistTensorData(array) for name, array in arrays.items()}
                first = contract._head(signature_of(fields), Origin(info, rows, Agreement(order=order)))
                if number == 0:
                    every.append(first)
                else:
                    every.append(np.concatenate([_checksums(fields), contract._samples(rows, 2)]))
            assert len(words) == len(every[0])
            return np.stack(every)

        monkeypatch.setattr(contract, "gather_words", gather)
        monkeypatch.setattr(contract, "_checksums", _checksums)
        monkeypatch.setattr(contract, "broadcast_py_object", lambda order, src: ranks[src][3])
        set_mesh(ParallelMesh(*sizes))
        arrays, info, rows, order = ranks[0]
        fields = {name: DistTensorData(array) for name, array in arrays.items()}
        check_contract(fields, Origin(info, rows, Agreement(order=order)))

    before = get_mesh()
    yield compare
    set_mesh(None if before.world_size == 1 else before)


def _checksums(fields: dict[str, DistTensorData], absent: AbstractSet[str] = frozenset()) -> np.ndarray:
    return np.array([checksum_of(value.tensor) for value in fields.values()], dtype=np.int64)


def test_sound_ranks_pass(compared: Any) -> None:
    compared([rank_of(0), rank_of(0), rank_of(1), rank_of(1)])
    compared([rank_of(0), rank_of(1), rank_of(0), rank_of(1)], sizes=(2, 1, 2))


def test_ranks_for_which_another_reads_pass(compared: Any) -> None:
    compared([rank_of(0), rank_of(0, reads=False), rank_of(1, reads=False), rank_of(1, reads=False)])


def test_padding_may_repeat_another_ranks_sample(compared: Any) -> None:
    shard0, shard1 = rank_of(0, valid=2), rank_of(1, valid=2)
    repeated = RowIndices(np.zeros(2, np.int64), np.array([1, 1]))
    padded: Rank = ({"x": np.array([10.0, 10.0])}, shard1[1], repeated, shard1[3])
    compared([shard0, shard0, padded, padded])


def test_rows_that_count_may_not_be_read_twice(compared: Any) -> None:
    shard0, shard1 = rank_of(0, valid=3), rank_of(1, valid=3)
    repeated = RowIndices(np.zeros(2, np.int64), np.array([1, 1]))
    padded: Rank = ({"x": np.array([10.0, 10.0])}, shard1[1], repeated, shard1[3])
    with pytest.raises(ContractError, match="step 3: sample 1 of epoch 0 was read by rank 0 and by rank 2"):
        compared([shard0, shard0, padded, padded])


def test_all_places_that_differ_are_named(compared: Any) -> None:
    with pytest.raises(ContractError, match=r"the step differs: 3 on rank 0-2, but 4 on rank 3; the position diff"):
        compared([rank_of(0), rank_of(0), rank_of(1), rank_of(1, step=4)])


def test_another_order_is_named_before_anything_that_follows_from_it(compared: Any) -> None:
    with pytest.raises(ContractError, match=r"samples differs: seed 0 on rank 0-1 3, but seed 1 on rank 2$"):
        compared([rank_of(0), rank_of(0), rank_of(1, order="seed 1"), rank_of(1)])


def test_other_bytes_are_named_by_field_and_ranks(compared: Any) -> None:
    other: Rank = ({"x": np.array([20.0, 31.0])}, *rank_of(1)[1:])
    with pytest.raises(ContractError, match=r"field 'x': rank 3 holds other bytes than rank 2 \(both of shard 1\)$"):
        compared([rank_of(0), rank_of(0), rank_of(1), other])
