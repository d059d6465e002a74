"""The digits of the example."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tools.prepare_digits import main, write_digits


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
