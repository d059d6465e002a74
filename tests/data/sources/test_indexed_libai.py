"""LiBai 0.1.1 reads what is written here, and what it writes is read here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libai_data.data.sources import IndexedSource, IndexedWriter

DOCUMENTS: list[list[list[int]]] = [[[1, 2, 3], [4]], [[5] * 700], [], [[6], [7, 8]]]


class Tensor:
    """All that LiBai's builder asks of a tensor."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def numpy(self) -> np.ndarray:
        return np.array(self.tokens)


@pytest.fixture()
def indexed_dataset(monkeypatch: pytest.MonkeyPatch) -> Any:
    # Its table of dtypes uses this name, which numpy 1.24 no longer has.
    monkeypatch.setattr(np, "float", float, raising=False)
    libai = importlib.util.find_spec("libai")
    if libai is None or not libai.submodule_search_locations:
        pytest.skip("LiBai 0.1.1 is needed, which is not installed")
    # The module alone: the package imports all of LiBai, and what it depends on.
    path = Path(libai.submodule_search_locations[0], "data", "data_utils", "indexed_dataset.py")
    specification = importlib.util.spec_from_file_location("libai_indexed_dataset", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.int64])
def test_libai_reads_what_is_written_here_and_writes_it_byte_for_byte_the_same(
    tmp_path: Path, indexed_dataset: Any, dtype: Any
) -> None:
    builder = indexed_dataset.MMapIndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    with IndexedWriter(tmp_path / "ours", dtype) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
            for sequence in document:
                builder.add_item(Tensor(sequence))
            builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"ours{ending}").read_bytes() == (tmp_path / f"theirs{ending}").read_bytes()
    flat = [sequence for document in DOCUMENTS for sequence in document]
    source = IndexedSource(tmp_path / "theirs")
    assert [source[number].tolist() for number in range(len(source))] == flat
    theirs = indexed_dataset.MMapIndexedDataset(str(tmp_path / "ours"), skip_warmup=True)
    assert [theirs[number].tolist() for number in range(len(theirs))] == flat
    assert all(theirs[number].dtype == dtype for number in range(len(theirs)))
    assert theirs.doc_idx.tolist() == [0, 2, 3, 3, 5]
    assert theirs.get(0, offset=1, length=2).tolist() == [2, 3]
