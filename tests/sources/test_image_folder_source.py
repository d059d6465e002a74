from __future__ import annotations

import os
import random
from pathlib import Path
from typing import List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.errors import ConfigError
from libai_data.sources import ImageFolderSource

paths = st.lists(
    st.tuples(st.sampled_from("abcß"), st.sampled_from(["1.png", "10.PNG", "2.jpeg", "sub/3.png", "é.png"])),
    min_size=1,
    unique=True,
)


def fill(root: Path, names: List[str]) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


@given(paths, st.integers(0, 100))
def test_the_order_does_not_depend_on_that_of_the_file_system(
    tmp_path_factory: pytest.TempPathFactory, files: List[str], seed: int
) -> None:
    names = ["/".join(parts) for parts in files]
    shuffled = random.Random(seed).sample(names, len(names))
    found = []
    for order in (names, shuffled):
        root = fill(tmp_path_factory.mktemp("images"), order)
        source = ImageFolderSource(root)
        assert len(source) == len(names)
        listed = [source[index] for index in range(len(source))]
        found.append([(str(path.relative_to(root)), label) for path, label in listed])
    assert found[0] == found[1]
    assert [label for _, label in found[0]] == sorted(label for _, label in found[0])


def test_labels_count_the_folders_by_name_and_classes_name_them(tmp_path: Path) -> None:
    source = ImageFolderSource(fill(tmp_path, ["dog/b.png", "dog/a.png", "cat/c.jpg", "cat/deep/er/d.png"]))
    assert source.classes == ["cat", "dog"]
    listed = [source[index] for index in range(len(source))]
    assert [(path.name, label) for path, label in listed] == [("c.jpg", 0), ("d.png", 0), ("a.png", 1), ("b.png", 1)]


def test_a_class_without_images_keeps_its_number(tmp_path: Path) -> None:
    (fill(tmp_path, ["0/a.png", "2/b.png"]) / "1").mkdir()
    source = ImageFolderSource(tmp_path)
    assert source.classes == ["0", "1", "2"]
    assert [source[index][1] for index in range(2)] == [0, 2]


def test_what_is_no_image_is_left_out(tmp_path: Path) -> None:
    names = ["a/1.png", "a/notes.txt", "a/2.png.part", "stray.png", ".cache/3.png", "a/folder.png/4.jpg"]
    source = ImageFolderSource(fill(tmp_path, names))
    assert source.classes == ["a"]
    assert [source[index][0].name for index in range(len(source))] == ["1.png", "4.jpg"]


def test_a_link_to_a_class_is_followed(tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere", ["1.png"])
    (tmp_path / "root").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "root" / "a")
    assert len(ImageFolderSource(tmp_path / "root")) == 1


def test_a_folder_that_is_not_there_or_holds_no_images_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no image folder .*absent"):
        ImageFolderSource(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"holds no images .*\.png"):
        ImageFolderSource(fill(tmp_path, ["a/notes.txt", "stray.png"]))
