from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from libai_data.engine.checkpoint.directory import FORMAT, MANIFEST, PendingDirectory, recover, verify
from libai_data.errors import CheckpointError
from tests.deadline import run_to_end


def write(target: Path, text: str = "hello") -> None:
    pending = PendingDirectory(target)
    with pending.open("a.json") as file:
        file.write(text.encode())
    pending.add_json("b.json", {"text": text})
    pending.commit()


def test_a_committed_directory_is_sound_and_replaces_one_of_the_same_name(tmp_path: Path) -> None:
    for text in ("old", "new"):
        write(tmp_path / "c", text)
        verify(tmp_path / "c")
        assert (tmp_path / "c" / "a.json").read_text() == text
        assert json.loads((tmp_path / "c" / "b.json").read_text()) == {"text": text}
        assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(
    "manifest",
    [
        *("", "[]", "{", '{"files": {}}', '{"files": {}, "format": "another"}', "\udcff"),
        *(f'{{"files": {files}, "format": "{FORMAT}"}}' for files in ('["a.json"]', '{"a.json": 5}', '{"a.json": {}}')),
    ],
)
def test_a_foreign_or_torn_manifest_is_refused(tmp_path: Path, manifest: str) -> None:
    write(tmp_path / "c")
    (tmp_path / "c" / MANIFEST).write_bytes(manifest.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=str(tmp_path / "c")):
        verify(tmp_path / "c")


KILLED = """
import os, signal, sys
from pathlib import Path
from libai_data.engine.checkpoint import directory

def killing(function, at, after):
    def call(*args, **kwargs):
        count[0] += 1
        if count[0] == at and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if count[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call

count = [0]
for number, cut in enumerate(sys.argv[2:]):
    pid = os.fork()
    if pid == 0:
        at, when = cut.split()
        os.fsync = killing(os.fsync, int(at), when == "after")
        os.rename = killing(os.rename, int(at), when == "after")
        directory.shutil.rmtree = killing(directory.shutil.rmtree, int(at), when == "after")
        pending = directory.PendingDirectory(Path(sys.argv[1]) / str(number) / "c")
        with pending.open("a.json") as file:
            file.write(b"new")
        pending.commit()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    print(-os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    cuts = [f"{at} {when}" for at in range(1, 12) for when in ("before", "after")]
    for number in range(len(cuts)):
        (tmp_path / str(number)).mkdir()
        write(tmp_path / str(number) / "c", "old")
    run = run_to_end([sys.executable, "-c", KILLED, str(tmp_path), *cuts])
    codes = [int(code) for code in run.stdout.split()]
    assert set(codes[:-2]) <= {0, -signal.SIGKILL}, run.stderr
    # The last cuts lie behind the end: so all moments were tried.
    assert codes[-2:] == [0, 0]
    texts = set()
    for number in range(len(cuts)):
        folder = tmp_path / str(number)
        recover(folder)
        verify(folder / "c")
        texts.add((folder / "c" / "a.json").read_text())
        assert [path.name for path in folder.iterdir()] == ["c"]
    assert texts == {"old", "new"}


@pytest.mark.parametrize("writer", ["C", "C.UTF-8"])
def test_a_name_with_letters_beyond_ascii_is_read_in_any_locale(writer: str, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from libai_data.engine.checkpoint.directory import write_small_file\n"
        "from libai_data.engine.checkpoint.folder import LAST, read_last\n"
        "folder, name = Path(sys.argv[1]), 'mod\\xe8le'\n"
    )
    for locale, line in ((writer, "write_small_file(folder / LAST, name)"), ("C", "assert read_last(folder) == name")):
        env = {**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        done = run_to_end([sys.executable, "-c", program + line, str(tmp_path)], env=env)
        assert done.returncode == 0, done.stderr


def test_files_of_other_programs_stay(tmp_path: Path) -> None:
    own = [tmp_path / "model.partial" / "state.json", tmp_path / "last_checkpoint.partial"]
    others = [tmp_path / "data.partial", tmp_path / "data.replaced", tmp_path / "download.partial" / "a.tar"]
    for path in own + others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    recover(tmp_path)
    assert [path.exists() for path in own + others] == [False, False, True, True, True]
