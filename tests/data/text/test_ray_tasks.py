"""Preprocessing on a local Ray: the bytes of a run without it, whatever happens to Ray's processes."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from libai_data.commands.preprocess import main
from libai_data.data.text import ray_tasks
from libai_data.data.text.parts import Cutting, Part, cut_into_parts
from libai_data.data.text.preprocessing import preprocess
from libai_data.data.text.shards import Task, TokenizingError
from libai_data.data.text.tokenizer import TokenizerFiles
from libai_data.errors import ConfigError
from tests.conftest import REPOSITORY
from tests.data.text.corpora import content, texts, write_json_lines

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def local_ray() -> Iterator[Any]:
    """A Ray of this machine alone, of which nothing is left."""
    ray = pytest.importorskip("ray")
    # The paths of its sockets must be short.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    before, environment = {*os.listdir("/tmp")}, dict(os.environ)
    try:
        start_ray(ray, folder)
        yield ray
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(environment)
        end_processes_of(folder)
        shutil.rmtree(folder)
        assert "ray" in before or "ray" not in os.listdir("/tmp")


def start_ray(ray: Any, folder: str) -> None:
    """Start Ray, anew if it has not started within its own 30 s, as on a busy machine."""
    for attempts_left in (2, 1, 0):
        try:
            ray.init(
                num_cpus=2,
                object_store_memory=100 << 20,
                include_dashboard=False,
                log_to_driver=False,
                _temp_dir=folder,
                _plasma_directory=folder,
                runtime_env={"env_vars": {"PYTHONPATH": str(REPOSITORY)}},
            )
            return
        except Exception as error:
            if not attempts_left or "timed out during startup" not in str(error):
                raise
        ray.shutdown()
        end_processes_of(folder)


def end_processes_of(folder: str) -> None:
    """End what a start of Ray that failed has left."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # It has ended.
            if folder.encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def corpus_of_three(folder: Path) -> list[str]:
    """JSON lines, compressed and not, with a bad line."""
    for number in range(3):
        write_json_lines(folder / f"{number}.jsonl", texts(60, seed=number), "bad\n" * (number == 1))
    (folder / "3.jsonl.gz").write_bytes(gzip.compress((folder / "2.jsonl").read_bytes()))
    return [str(path) for path in sorted(folder.glob("*.jsonl*"))]


def test_on_ray_the_bytes_are_those_of_a_local_run(local_ray: Any, tmp_path: Path, tokenizer: str) -> None:
    inputs, task, cutting = corpus_of_three(tmp_path), Task(TokenizerFiles(tokenizer)), Cutting(part_bytes=1500)
    local = preprocess(inputs, str(tmp_path / "local"), task, cutting=cutting)
    on_ray = preprocess(inputs, str(tmp_path / "ray"), task, cutting=cutting, workers=2, cluster="ray")
    assert content(on_ray.prefixes["text"]) == content(local.prefixes["text"])
    assert (on_ray.documents, on_ray.tokens, on_ray.bad) == (240, local.tokens, 1)
    assert (tmp_path / "ray.bad_lines").read_bytes() == (tmp_path / "local.bad_lines").read_bytes()
    assert not (tmp_path / "ray.parts").exists()


def test_the_command_goes_on_on_ray_with_shards_that_were_finished_without(
    local_ray: Any,
    tmp_path: Path,
    tokenizer: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    inputs = corpus_of_three(tmp_path)
    # Relative paths lead on all machines to where they lead here.
    monkeypatch.chdir(tmp_path)
    arguments = ["--input", *map(os.path.basename, inputs), "--tokenizer", tokenizer, "--output-prefix", "out/x"]
    assert main([*arguments, "--refuse-bad-lines"]) == 1
    assert main([*arguments, "--cluster", "ray"]) == 0
    assert "1 shards were kept" in capsys.readouterr().out
    local = preprocess(inputs, str(tmp_path / "local"), Task(TokenizerFiles(tokenizer)))
    assert content("out/x_text_document") == content(local.prefixes["text"])


@dataclass(frozen=True)
class Deadly(Part):
    """A part that kills each process which is to tokenize it, or only the first one, which makes the file `once`."""

    once: str = ""

    def __reduce__(self) -> Any:
        return _kill_or_make, (self.once, self.pieces)


def _kill_or_make(once: str, pieces: Any) -> Part:
    if not once or not os.path.exists(once):
        if once:
            Path(once).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return Part(0, pieces)


def test_a_process_of_ray_that_is_killed_is_replaced(local_ray: Any, tmp_path: Path, tokenizer: str) -> None:
    (part,) = cut_into_parts([write_json_lines(tmp_path / "corpus.jsonl", texts(60))], Cutting())
    deadly, task = Deadly(0, part.pieces, str(tmp_path / "killed")), Task(TokenizerFiles(tokenizer))
    [(_, report)] = ray_tasks.tokenize_on_ray(tmp_path, [deadly], task, 1)
    assert report.documents == 60 and (tmp_path / "killed").exists()


def test_what_fails_is_told_with_its_part_and_what_to_do(
    local_ray: Any, tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_json_lines(tmp_path / "corpus.jsonl", texts(5))
    parts = list(cut_into_parts([corpus], Cutting()))
    shutil.copy(tokenizer, tmp_path / "missing.json")
    missing = Task(TokenizerFiles(str(tmp_path / "missing.json")))
    (tmp_path / "missing.json").unlink()
    told = rf"(?s)part 0 \(.*corpus.jsonl\) failed on {os.uname().nodename}.*missing.json"
    with pytest.raises(TokenizingError, match=told):
        list(ray_tasks.tokenize_on_ray(tmp_path, parts, missing, 1))
    with pytest.raises(TokenizingError, match="Ray gave up"):
        list(ray_tasks.tokenize_on_ray(tmp_path, [Deadly(0, parts[0].pieces)], Task(TokenizerFiles(tokenizer)), 1))
    monkeypatch.setattr(ray_tasks, "finished_shard", lambda folder, number: None)
    monkeypatch.setattr(ray_tasks, "_SECONDS_TO_APPEAR", 0.0)
    with pytest.raises(TokenizingError, match="let --output-prefix be on a file system that all machines share"):
        list(ray_tasks.tokenize_on_ray(tmp_path, parts, Task(TokenizerFiles(tokenizer)), 1))


def test_a_cluster_of_another_kind_is_refused(tmp_path: Path, tokenizer: str) -> None:
    with pytest.raises(ConfigError, match="cluster is 'slurm'; it must be"):
        preprocess([str(tmp_path)], str(tmp_path / "out"), Task(TokenizerFiles(tokenizer)), cluster="slurm")


def test_a_tokenizer_that_was_trained_again_makes_the_tokens_of_the_next_run(
    local_ray: Any, tmp_path: Path, tokenizer: str
) -> None:
    write_json_lines(tmp_path / "corpus.jsonl", texts(20))
    own = Path(shutil.copy(tokenizer, tmp_path / "tokenizer.json"))
    arguments: tuple[Any, ...] = ([str(tmp_path / "corpus.jsonl")], str(tmp_path / "x"), Task(TokenizerFiles(str(own))))
    before = preprocess(*arguments, cluster="ray")
    found = json.loads(own.read_text(encoding="utf-8"))
    found["model"]["merges"] = []
    own.write_text(json.dumps(found), encoding="utf-8")
    assert preprocess(*arguments, cluster="ray").tokens == preprocess(*arguments).tokens != before.tokens
