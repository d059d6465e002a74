from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from libai_data.sources.digits import main, write_digits


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "digits"
    assert write_digits(root)
    return root


def test_all_1797_pictures_are_written_every_fifth_for_testing(digits: Path) -> None:
    files = files_below(digits)
    assert len(files) == 1797
    assert sum(name.startswith("test/") for name in files) == 360
    assert {name.split("/")[1] for name in files} == set("0123456789")
    assert {path.name for path in digits.iterdir()} == {"train", "test"}


def test_a_picture_is_that_of_scikit_learn(digits: Path) -> None:
    from sklearn.datasets import load_digits

    source = load_digits()
    for number in (0, 1, 7, 1796):
        part = "test" if number % 5 == 0 else "train"
        with Image.open(digits / part / str(source.target[number]) / f"{number:04d}.png") as image:
            pixels = np.asarray(image)
        assert pixels.dtype == np.uint8
        np.testing.assert_allclose(pixels * (16 / 255), source.images[number], atol=0.04)


def test_a_second_run_writes_nothing(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in digits.rglob("*")}
    assert not write_digits(digits)
    main([str(digits)])
    assert "Found" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in digits.rglob("*")} == before


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(FileExistsError, match="holds no train/ and test/"):
        write_digits(tmp_path)
    assert files_below(tmp_path) == ["mine.txt"]


def test_a_failure_half_way_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Image.Image.save

    def save(image: Any, path: Path, *arguments: Any) -> None:
        if path.name == "0900.png":
            raise OSError(28, "No space left on device")
        saved(image, path, *arguments)

    monkeypatch.setattr(Image.Image, "save", save)
    with pytest.raises(OSError, match="No space left"):
        write_digits(tmp_path / "digits")
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_is_killed_leaves_no_folder_that_looks_finished(tmp_path: Path) -> None:
    root = tmp_path / "digits"
    writer = multiprocessing.get_context("spawn").Process(target=write_digits, args=(root,))
    writer.start()
    deadline = time.monotonic() + 50
    while not list(tmp_path.rglob("*.png")) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    if root.exists():  # it was faster than the signal
        assert len(files_below(root)) == 1797
    else:
        assert write_digits(root)
        assert len(files_below(root)) == 1797


def test_writers_at_the_same_time_agree_on_one_whole_folder(tmp_path: Path) -> None:
    root = tmp_path / "digits"
    written: dict[int, bool] = {}

    def write(number: int) -> None:
        written[number] = write_digits(root)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(written.values()) == [False, False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]
    assert len(files_below(root)) == 1797
