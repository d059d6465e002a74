"""A store of objects on this machine, for all tests of sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.sources.object_store import ObjectStore


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectStore]:
    """The server; tests use `object_store`."""
    store = ObjectStore()
    yield store
    store.close()


@pytest.fixture
def object_store(object_server: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """An empty bucket, which s3:// leads to, and an empty cache in `<tmp_path>/cache`."""
    import s3fs

    object_server.reset()
    for name, value in object_server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LIBAI_DATA_STORAGE_ATTEMPTS", "3")
    s3fs.S3FileSystem.clear_instance_cache()
    yield object_server
    object_server.go_on.set()
    s3fs.S3FileSystem.clear_instance_cache()
