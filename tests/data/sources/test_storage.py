"""Files of stores: found, fetched whole, kept within bounds, and shared by the processes of a node."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Callable

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from libai_data.data.sources import local_cache, open_source, remote
from libai_data.data.sources.local_cache import LocalCache, is_used, use
from libai_data.data.sources.remote import fetch, look_up
from libai_data.data.sources.shard_counts import counted
from libai_data.data.sources.storage import LocalFile, Storage, listed, local_path
from libai_data.errors import ConfigError, StorageError
from tests.data.sources.object_store import BUSY, CUT, FAIL, FLIP, STALL, ObjectStore
from tests.data.sources.published_files import WebFolder
from tests.deadline import printed_by, stretched, wait_for_a_lock
from tests.forks import a_fork_that_lives_on
from tests.pipes import next_line
from tests.properties import slowly

READ = (
    "import sys; import s3fs; from libai_data.data.sources.storage import LocalFile; "
    "print('ready', flush=True); input(); print(len(LocalFile(sys.argv[1]).path.read_bytes()))"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    left_out = (".hidden", "deep/.hidden/e.tar", "_SUCCESS", "deep/_metadata", "dataset_info.json")
    for name in ("b.tar", "a.tar", "c.txt", "deep/d.tar", *left_out):
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path / "files"


@pytest.fixture
def web(folder: Path) -> Iterator[str]:
    server = WebFolder(folder)
    yield server.url
    server.close()


def kept_files(cache: Path) -> list[str]:
    return sorted(path.name.partition("-")[2] for path in cache.iterdir() if "-" in path.name)


def reader_of(url: str) -> subprocess.Popen:
    """A process that has imported all it needs, and reads when it is told to begin."""
    command, pipe = [sys.executable, "-c", READ, url], subprocess.PIPE
    reader = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert next_line(reader) == "ready\n"
    return reader


def begin(*readers: subprocess.Popen) -> None:
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("\n")
        reader.stdin.flush()


def test_local_files_are_listed_in_the_order_of_patterns_then_of_names(folder: Path) -> None:
    assert listed(str(folder / "*.tar")) == [str(folder / "a.tar"), str(folder / "b.tar")]
    assert listed(folder) == [str(folder / name) for name in ("a.tar", "b.tar", "c.txt", "deep/d.tar")]
    patterns: list[str | Path] = [folder / "c.txt", f"file://{folder}/**/*.tar", folder / "a.tar"]
    assert listed(patterns) == [str(folder / name) for name in ("c.txt", "a.tar", "b.tar", "deep/d.tar")]


@pytest.mark.parametrize("pattern", ["{}/*.parquet", "{}/nothing", "file://{}/*.parquet"])
def test_a_pattern_that_names_no_file_is_refused_by_its_text(folder: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match="no file is named by"):
        listed([str(folder), pattern.format(folder)])
    with pytest.raises(ConfigError, match="no files are given"):
        listed([])
    with pytest.raises(ConfigError, match=r"files is None; it must be a file, a glob or a folder"):
        listed(None)  # type: ignore[arg-type]


def test_a_local_path_is_itself_and_needs_no_fsspec(folder: Path) -> None:
    program = (
        "import sys; from libai_data.data.sources.storage import listed, local_path\n"
        "print(local_path(listed(sys.argv[1])[0])); assert 'fsspec' not in sys.modules"
    )
    told = subprocess.run([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True, check=True)
    assert told.stdout.strip() == str(folder / "a.tar")
    with pytest.raises(ConfigError, match="there is no file"):
        local_path(folder / "nothing")


def test_objects_are_listed_as_local_files_are(object_store: ObjectStore) -> None:
    for name in ("d/b.tar", "d/a.tar", "d/deep/c.tar", "d/.hidden", "d/_SUCCESS", "d/deep/_common_metadata", "e/f.tar"):
        object_store.put(name, b"x")
    expected = [f"s3://bucket/d/{name}" for name in ("a.tar", "b.tar", "deep/c.tar")]
    assert listed("s3://bucket/d") == listed("s3://bucket/d/") == expected
    assert listed("s3://bucket/d/*.tar") == expected[:2]
    assert listed(["s3://bucket/e/f.tar", "s3://bucket/**/c.tar"]) == ["s3://bucket/e/f.tar", expected[2]]
    for nothing in ("s3://bucket/d/*.txt", "s3://bucket/nothing", "s3://another-bucket/d"):
        with pytest.raises(ConfigError, match="no file is named by 's3://"):
            listed(nothing)


class StoreOfAHost(MemoryFileSystem):
    """A store whose paths lack the host of their address, as those of hdfs://, sftp:// and ftp:// do."""

    protocol = "hosted"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return re.sub("^hosted://[^/]*", "", path).rstrip("/")


@pytest.mark.parametrize("address", ["s3a://bucket/d", "memory://bucket/d", "hosted://user@host:80/bucket/d"])
def test_files_have_the_address_under_which_their_folder_was_given(address: str, object_store: ObjectStore) -> None:
    fsspec.register_implementation("hosted", StoreOfAHost, clobber=True)
    for name in ("0.npy", "deep/1.npy"):
        content = io.BytesIO()
        np.save(content, np.arange(2))
        object_store.put(f"d/{name}", content.getvalue())
        fsspec.filesystem("memory").pipe(f"/bucket/d/{name}", content.getvalue())
    expected = [f"{address}/0.npy", f"{address}/deep/1.npy"]
    assert listed(address) == listed(f"{address}/") == listed(f"{address}/**/*.npy") == expected
    assert local_path(expected[1]).read_bytes() == content.getvalue()
    assert counted(address, open_copy=open_source).names.many(np.arange(2)) == ["0.npy", "deep/1.npy"]


def test_web_pages_list_their_files_and_give_them(web: str, object_store: ObjectStore) -> None:
    assert listed(f"{web}/*.tar") == [f"{web}/a.tar", f"{web}/b.tar"]
    assert listed(f"{web}/c.txt") == [f"{web}/c.txt"]
    assert listed(f"{web}/deep") == listed(f"{web}/deep/") == [f"{web}/deep/d.tar"]
    assert local_path(f"{web}/deep/d.tar").read_bytes() == b"deep/d.tar"
    with pytest.raises(ConfigError, match=f"there is no {web}/nothing"):
        local_path(f"{web}/nothing")
    with pytest.raises(ConfigError, match=f"{web}/deep is a folder"):
        local_path(f"{web}/deep")


def test_web_pages_list_files_with_odd_names_in_the_order_of_local_files(
    web: str, folder: Path, object_store: ObjectStore
) -> None:
    for name in ("a b", "a!", "\u00fcber", "z%"):
        (folder / f"{name}.tar").write_text(name)
    found = [local_path(address).read_bytes() for address in listed(f"{web}/*.tar")]
    assert found == [Path(path).read_bytes() for path in listed(f"{folder}/*.tar")]
    assert listed([f"{web}/a b.tar", f"{web}/*b.tar"]) == [f"{web}/a b.tar", f"{web}/b.tar"], "each is listed once"
    (folder / "a?b.tar").write_text("another file")
    assert len(listed([f"{web}/a.tar?b.tar", f"{web}/a%3Fb.tar", f"{web}/\u00fcber.tar", f"{web}/%C3%BCber.tar"])) == 3


def test_a_web_server_that_denies_access_is_named_with_that_reason(folder: Path, object_store: ObjectStore) -> None:
    denied = r"/a.tar cannot be looked up: access is denied .*403"
    with closing(WebFolder(folder, denied="/a.tar")) as server, pytest.raises(ConfigError, match=denied):
        local_path(f"{server.url}/a.tar")


@pytest.mark.parametrize("busy", [[True, False, True], [True, True], [False, True]])
@pytest.mark.parametrize("name", ["a.tar", "deep/", "deep/*.tar"])
def test_files_of_a_web_server_that_is_busy_are_not_reported_as_missing(
    busy: list[bool], name: str, folder: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_FIRST_WAIT", 0.01)
    with closing(WebFolder(folder, busy=busy)) as server:
        expected = "a.tar" if name == "a.tar" else "deep/d.tar"
        assert listed(f"{server.url}/{name}") == [f"{server.url}/{expected}"]
        with pytest.raises(ConfigError, match="no file is named by"):
            listed(f"{server.url}/nothing.tar")


def test_a_web_server_that_is_not_there_or_says_nothing_is_named_with_the_attempts(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_SECONDS_OF_SILENCE", stretched(0.1))
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as absent:
        absent.bind(("127.0.0.1", 0))  # Nobody else listens there.
        for server, reason in ((absent, "onnect"), (silent, "imeout")):
            port = server.getsockname()[1]
            url = f"http://127.0.0.1:{port}/x"
            with pytest.raises(StorageError, match=rf"{url} could not be looked up in 3 attempts.*{reason}"):
                local_path(url)


def test_an_object_is_fetched_once_and_keeps_its_ending(object_store: ObjectStore) -> None:
    url = object_store.put("some folder/shard 0.tar", b"content")
    with LocalFile(url) as first, LocalFile(url) as second:
        assert first.path == second.path
        assert first.path.read_bytes() == b"content"
        assert first.path.name.endswith("-shard_0.tar")
    assert len(object_store.gets) == 1


@pytest.mark.parametrize("faults", [[CUT, FAIL], [FLIP, BUSY]])
def test_a_store_that_fails_is_asked_again(object_store: ObjectStore, faults: list[str]) -> None:
    data = os.urandom(300_000)
    url = object_store.put("shard.tar", data)
    object_store.faults = list(faults)
    assert LocalFile(url).path.read_bytes() == data
    assert not object_store.faults and len(object_store.gets) == 3


def test_credentials_that_are_set_after_a_failure_are_used(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    url = object_store.put("a.tar", b"a")
    s3fs.S3FileSystem.clear_instance_cache()
    with monkeypatch.context() as without:
        without.delenv("AWS_ACCESS_KEY_ID")
        with pytest.raises(StorageError, match="NoCredentialsError: Unable to locate credentials"):
            local_path(url)
    assert local_path(url).read_bytes() == b"a"


@pytest.mark.parametrize("fault", [FAIL, slowly(CUT)])
def test_a_store_that_always_fails_is_named_with_the_attempts_and_leaves_no_file(
    object_store: ObjectStore, tmp_path: Path, fault: str
) -> None:
    url = object_store.put("shard.tar", b"content")
    object_store.faults = [fault] * 100
    with pytest.raises(
        StorageError, match=r"s3://bucket/shard\.tar could not be fetched in 3 attempts; the last error"
    ):
        LocalFile(url)
    assert len(object_store.gets) == 3, "s3fs and botocore do not try again on their own"
    assert not list((tmp_path / "cache" / "files").glob("*.part")) and not kept_files(tmp_path / "cache" / "files")
    object_store.faults = []
    with LocalFile(url) as file:
        assert file.path.read_bytes() == b"content"
        os.truncate(file.path, 3)
    assert LocalFile(url).path.read_bytes() == b"content"


def test_a_tag_that_is_no_sum_costs_a_second_look_and_no_more(object_store: ObjectStore) -> None:
    url = object_store.put("encrypted.tar", b"content")
    object_store.tag = '"0123456789abcdef0123456789abcdef"'
    assert LocalFile(url).path.read_bytes() == b"content"
    assert len(object_store.gets) == 2


def test_a_changed_object_is_fetched_anew_and_refused_to_who_knew_the_old_one(object_store: ObjectStore) -> None:
    url = object_store.put("shard.tar", b"before")
    old = LocalFile(url)
    object_store.put("shard.tar", b"after!")
    new = LocalFile(url)
    assert (old.path.read_bytes(), new.path.read_bytes()) == (b"before", b"after!")
    assert pickle.loads(pickle.dumps(new)).path == new.path
    with pytest.raises(StorageError, match=r"s3://bucket/shard\.tar has changed since it was first opened"):
        pickle.loads(pickle.dumps(old))


def test_an_object_that_changes_while_it_is_fetched_is_refused(object_store: ObjectStore, tmp_path: Path) -> None:
    url = object_store.put("shard.tar", b"before")
    object_store.before_get = lambda _: object_store.put("shard.tar", b"after!")
    with pytest.raises(StorageError, match=r"shard\.tar has changed while it .*: 6 bytes as before, but another"):
        LocalFile(url)
    object_store.before_get = lambda _: object_store.put("shard.tar", b"longer")
    object_store.put("shard.tar", b"short")
    with pytest.raises(StorageError, match=r"shard\.tar has changed while it .*reports: 6 bytes instead of 5"):
        LocalFile(url)
    assert not kept_files(tmp_path / "cache" / "files")


@pytest.mark.parametrize("from_web", [True, False])
def test_a_cache_that_is_deleted_after_a_download_is_not_taken_for_a_missing_file(
    from_web: bool, web: str, object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{web}/a.tar" if from_web else object_store.put("a", b"content")
    cache = tmp_path / "cache" / "files"
    described, looks, others = remote._described, iter(range(100)), []

    def described_while_the_cache_is_deleted(*arguments: Any) -> Any:
        if next(looks) == 1:  # after the download
            (part,) = cache.glob("*.part")
            shutil.rmtree(tmp_path / "cache")
            cache.mkdir(parents=True)
            others.append(part.open("wb+", 0))  # as another process that makes the copy
            others[0].write(b"begun")
        return described(*arguments)

    monkeypatch.setattr(remote, "_described", described_while_the_cache_is_deleted)
    with LocalFile(url) as file:
        assert file.path.read_bytes() == (b"a.tar" if from_web else b"content")
    assert next(looks) == 3, "it was fetched twice"
    assert os.pread(others[0].fileno(), 100, 0) == b"begun", "the other process alone writes to its file"
    others[0].close()


def test_the_least_recently_used_copies_go_and_never_one_in_use(object_store: ObjectStore, tmp_path: Path) -> None:
    urls = [object_store.put(f"{name}.tar", bytes(400)) for name in "abcd"]
    storage = Storage(tmp_path / "cache" / "files", size=1000)
    in_use = LocalFile(urls[0], storage)
    for url in urls[1:]:
        LocalFile(url, storage).close()
        assert sum(path.stat().st_size for path in (tmp_path / "cache" / "files").iterdir()) <= 1000
    assert kept_files(tmp_path / "cache" / "files") == ["a.tar", "d.tar"]
    in_use.close()
    LocalFile(urls[3], storage).close()
    LocalFile(urls[2], storage).close()
    assert kept_files(tmp_path / "cache" / "files") == ["c.tar", "d.tar"]


def test_a_copy_that_is_released_while_room_is_made_has_its_new_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = LocalCache(tmp_path, size=1000)
    keys = {name: name * 24 for name in "abcd"}

    def make(part: Path) -> None:
        part.write_bytes(bytes(300))

    def held(name: str) -> Callable[[], None]:
        return cache.hold(keys[name], name, 300, make)[1]

    in_use = held("a")
    for name, when in (("b", 2**62), ("c", 2**62 + 2)):
        held(name)()
        cache.expect(keys[name], when)
    entries_of = LocalCache._entries

    def released_meanwhile(self: LocalCache) -> dict:
        entries = entries_of(self)
        cache.expect(keys["a"], 2**62 + 1)
        in_use()
        return entries

    monkeypatch.setattr(LocalCache, "_entries", released_meanwhile)
    held("d")()
    assert kept_files(tmp_path) == ["a", "c", "d"]


def test_a_copy_is_in_use_until_all_who_hold_it_let_go(object_store: ObjectStore, tmp_path: Path) -> None:
    first, second = (object_store.put(name, bytes(600)) for name in ("a.tar", "b.tar"))
    storage = Storage(tmp_path / "cache" / "files", size=1000)
    holders = [LocalFile(first, storage), LocalFile(first, storage)]
    while holders:
        with pytest.raises(StorageError, match=r"600 bytes finds no room .* of 1000 bytes, where 600 bytes are in use"):
            LocalFile(second, storage)
        del holders[0]
    assert LocalFile(second, storage).path.read_bytes() == bytes(600)
    with pytest.raises(StorageError, match=r"2000 bytes finds no room .*LIBAI_DATA_CACHE_SIZE"):
        LocalFile(object_store.put("larger than the cache.tar", bytes(2000)), storage)
    assert len(object_store.gets) == 2


def test_what_is_open_stays_readable_when_its_copy_goes(object_store: ObjectStore, tmp_path: Path) -> None:
    storage = Storage(tmp_path / "cache" / "files", size=1000)
    with LocalFile(object_store.put("a.tar", b"a" * 600), storage) as file:
        stream = file.path.open("rb")
    LocalFile(object_store.put("b.tar", b"b" * 600), storage)
    with stream:
        assert not file.path.exists() and stream.read() == b"a" * 600


@pytest.mark.slow
def test_of_two_processes_one_downloads_and_the_other_waits(object_store: ObjectStore) -> None:
    url = object_store.put("shard.tar", bytes(200_000))
    object_store.faults = [STALL]
    readers = [reader_of(url) for _ in range(3)]
    begin(*readers)
    assert object_store.sent.wait(stretched(60))
    object_store.go_on.set()
    assert [printed_by(reader)[0].strip() for reader in readers] == ["200000"] * 3
    assert len(object_store.gets) == 1


@pytest.mark.slow
def test_who_waits_for_a_download_that_fails_fails_with_its_reason(object_store: ObjectStore, tmp_path: Path) -> None:
    url = object_store.put("shard.tar", bytes(200_000))
    os.environ["LIBAI_DATA_STORAGE_ATTEMPTS"] = "1"
    object_store.faults = [STALL]
    first, second = reader_of(url), reader_of(url)
    begin(first)
    assert object_store.sent.wait(stretched(60))
    begin(second)
    wait_for_a_lock(second)
    object_store.put("shard.tar", bytes(100_000))
    object_store.go_on.set()
    told = [printed_by(reader)[1] for reader in (first, second)]
    assert "has changed while it was fetched" in told[0]
    assert "the process that was fetching" in told[1] and "has changed while it was fetched" in told[1]
    assert len(object_store.gets) == 1


def test_a_killed_downloader_leaves_nothing_that_counts_and_another_takes_over(
    object_store: ObjectStore, tmp_path: Path
) -> None:
    url = object_store.put("shard.tar", os.urandom(200_000))
    object_store.faults = [STALL]
    first, second = reader_of(url), reader_of(url)
    begin(first)
    assert object_store.sent.wait(stretched(60))
    begin(second)
    wait_for_a_lock(second)
    first.send_signal(signal.SIGKILL)
    printed_by(first)
    assert printed_by(second)[0].strip() == "200000"
    assert len(object_store.gets) == 2
    assert not list((tmp_path / "cache" / "files").glob("*.part")) and not list(
        (tmp_path / "cache" / "files").glob("*.room")
    )


def test_what_a_killed_downloader_left_makes_room(object_store: ObjectStore, tmp_path: Path) -> None:
    os.environ["LIBAI_DATA_CACHE_SIZE"] = "300 kB"
    object_store.faults = [STALL]
    first = reader_of(object_store.put("first.tar", bytes(200_000)))
    begin(first)
    assert object_store.sent.wait(stretched(60))
    other = object_store.put("other.tar", bytes(200_000))
    with pytest.raises(StorageError, match="200000 bytes are in use in 1 files"):
        LocalFile(other)
    first.send_signal(signal.SIGKILL)
    printed_by(first)
    assert LocalFile(other).path.stat().st_size == 200_000
    assert kept_files(tmp_path / "cache" / "files") == ["other.tar"]


def test_a_file_of_a_worker_is_that_of_its_parent(object_store: ObjectStore) -> None:
    import s3fs

    file = LocalFile(object_store.put("shard.tar", b"content"))
    child = os.fork()
    if child == 0:
        try:
            again = LocalFile(file.source)
            os._exit(0 if again.path.read_bytes() == b"content" and again.path == file.path else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert len(object_store.gets) == 1
    # The child's end stops the events of its parent's connections, which later tests would wait for.
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("name", "value", "size"),
    [
        ("SIZE", "much", None),
        ("SIZE", "0", None),
        ("SIZE", "9" * 400, None),
        ("ATTEMPTS", "\u00b2", None),
        ("ATTEMPTS", "-1", None),
        ("ATTEMPTS", "0", None),
        ("SIZE", "1.5 kB", 1500),
        ("SIZE", "64GB", 64 * 10**9),
        ("SIZE", "64Gi", 64 * 2**30),
        ("SIZE", "0.5 mib", 2**19),
        ("SIZE", "7", 7),
        ("SIZE", "7i", None),
    ],
)
def test_settings_are_read_with_their_units_or_refused(name: str, value: str, size: int | None) -> None:
    variable = "LIBAI_DATA_CACHE_SIZE" if name == "SIZE" else "LIBAI_DATA_STORAGE_ATTEMPTS"
    os.environ[variable] = value
    if size is None:
        with pytest.raises(ConfigError, match=variable):
            Storage.from_environment()
    else:
        assert Storage.from_environment().size == size


@pytest.mark.parametrize("url", ["nonsense://x/y", "simplecache::s3://bucket/x"])
def test_addresses_that_cannot_be_read_are_refused(url: str, object_store: ObjectStore) -> None:
    with pytest.raises(ConfigError, match=url.partition("://")[0]):
        local_path(url)


def test_a_forked_process_keeps_a_copy_that_its_parent_let_go(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe({f"/forked/{name}": bytes(600) for name in "ab"})
    first, second = "memory://forked/a", "memory://forked/b"
    storage = Storage(tmp_path / "cache" / "files", size=1000)
    file = LocalFile(first, storage)
    with a_fork_that_lives_on():
        file.close()
        with pytest.raises(StorageError, match="finds no room"):
            LocalFile(second, storage)
    assert LocalFile(second, storage).path.exists()


@pytest.mark.parametrize("named", ["~/cache", "file://{}/cache", "s3://bucket/cache"])
def test_the_cache_is_a_folder_of_this_machine_however_it_is_named(
    named: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", named.format(tmp_path))
    if named.startswith("s3"):
        with pytest.raises(ConfigError, match="LIBAI_DATA_CACHE_DIR is 's3://bucket/cache', an address in a store"):
            Storage.from_environment()
        return
    fetch(look_up(f"file://{folder}/a.tar", 1), Storage.from_environment().directory / "a.tar", 1)
    copy = tmp_path / ("~/cache" if named.startswith("~") else "cache") / "files" / "a.tar"
    assert copy.read_bytes() == b"a.tar"


def test_a_use_that_the_garbage_collector_ends_while_another_begins_does_not_end_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = "1" * 24, "2" * 24
    ends, lock = [use(tmp_path, first)], local_cache._lock

    def lock_after_a_collection(*arguments: Any) -> bool:
        while ends:
            ends.pop()()
        return lock(*arguments)

    monkeypatch.setattr(local_cache, "_lock", lock_after_a_collection)
    end = use(tmp_path, second)
    assert is_used(tmp_path, second) and not is_used(tmp_path, first)
    end()
    assert not is_used(tmp_path, second)


def test_any_number_of_copies_in_use_needs_one_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path))
    fsspec.filesystem("memory").pipe({f"/many/{number}": b"x" for number in range(40)})

    def descriptors() -> int:
        """Those of the cache; others may be closed meanwhile."""
        links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return sum(link.startswith(f"{tmp_path}/") for link in links)

    files = [LocalFile(f"memory://many/{number}") for number in range(40)]
    assert descriptors() == 1
    del files
    assert descriptors() == 0
