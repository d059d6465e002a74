"""A store of objects on this machine, for all tests of sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from libai_data.data.sources import remote
from tests.data.sources.object_store import ObjectStore


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectStore]:
    """The server; tests use `served` or `object_store`."""
    import s3fs

    # Clients of another server; those of this one are kept from test to test, as each takes long to make.
    s3fs.S3FileSystem.clear_instance_cache()
    store = ObjectStore()
    yield store
    store.close()


@pytest.fixture
def object_store(served: ObjectStore) -> ObjectStore:
    """An empty bucket, which s3:// leads to, and an empty cache in `<tmp_path>/cache`."""
    served.empty()
    return served


@pytest.fixture
def served(object_server: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The same, with what the test before has left in the bucket."""
    object_server.end_faults()
    for name, value in object_server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LIBAI_DATA_STORAGE_ATTEMPTS", "3")
    monkeypatch.setattr(remote, "_FIRST_WAIT", 0.01)
    yield object_server
    object_server.go_on.set()
