from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data.data.sources import ImageFolderSource
from libai_data.errors import ConfigError

NOBODY = 65534
paths = st.lists(
    st.tuples(st.sampled_from("abcß"), st.sampled_from(["1.png", "10.PNG", "2.jpeg", "sub/3.png", "é.png"])),
    min_size=1,
    unique=True,
)


def fill(root: Path, names: list[str]) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


@given(paths, st.integers(0, 100))
def test_the_order_does_not_depend_on_that_of_the_file_system(
    tmp_path_factory: pytest.TempPathFactory, files: list[str], seed: int
) -> None:
    names = ["/".join(parts) for parts in files]
    shuffled = random.Random(seed).sample(names, len(names))
    found = []
    for order in (names, shuffled):
        root = fill(tmp_path_factory.mktemp("images"), order)
        source = ImageFolderSource(root, nested="merge")
        assert len(source) == len(names)
        found.append([(str(path.relative_to(root)), label) for path, label in content(source)])
    assert found[0] == found[1]
    assert [label for _, label in found[0]] == sorted(label for _, label in found[0])


def test_a_class_without_images_keeps_its_number(tmp_path: Path) -> None:
    (fill(tmp_path / "images", ["2/b.png", "0/deep/er/a.png"]) / "1").mkdir()
    fill(tmp_path / "elsewhere", ["c.png"])
    os.symlink(tmp_path / "elsewhere", tmp_path / "images" / "3")
    source = ImageFolderSource(tmp_path / "images", nested="merge")
    assert source.classes == ["0", "1", "2", "3"]
    assert [(path.name, label) for path, label in content(source)] == [("a.png", 0), ("b.png", 2), ("c.png", 3)]


@pytest.mark.parametrize("few", [1, 100])
def test_linked_folders_count_as_folders_each_once(tmp_path: Path, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libai_data.data.sources.image_folder._FEW_FILES", few)
    root = fill(tmp_path / "images", ["cat/1.png", "cat/old/3.png", "dog/1.png"])
    fill(tmp_path / "elsewhere", ["2.png"])
    for name, target in (("cat/more", "elsewhere"), ("cat/again", "elsewhere"), ("cat/old/loop", "images/cat")):
        os.symlink(tmp_path / target, root / name)
    with pytest.raises(ConfigError, match=r"cat/again/2\.png is in a folder within the class 'cat'"):
        ImageFolderSource(root, cache_dir=tmp_path / "cache")
    source = ImageFolderSource(root, cache_dir=tmp_path / "cache", nested="merge")
    found = [str(path.relative_to(root)) for path, _ in content(source)]
    assert found == ["cat/1.png", "cat/again/2.png", "cat/old/3.png", "dog/1.png"]


def test_what_is_no_image_is_left_out(tmp_path: Path) -> None:
    names = ["a/1.png", "a/notes.txt", "a/2.png.part", "stray.png", ".cache/3.png", "a/folder.png/4.jpg"]
    source = ImageFolderSource(fill(tmp_path, names), nested="merge")
    assert source.classes == ["a"]
    assert [source[index][0].name for index in range(len(source))] == ["1.png", "4.jpg"]


def test_a_folder_that_is_not_there_or_holds_no_images_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no image folder .*absent"):
        ImageFolderSource(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"has no images .*\.png"):
        ImageFolderSource(fill(tmp_path, ["a/notes.txt", "stray.png"]))


@pytest.mark.parametrize("many", [False, True])
def test_images_in_folders_within_a_class_are_refused_or_counted_to_it(
    request: pytest.FixtureRequest, tmp_path: Path, many: bool
) -> None:
    if many:
        request.getfixturevalue("few")
    names = ["animals/cat/1.png", "animals/dog/2.png", "cars/3.png", "cars/empty/notes.txt", "cars/4.png", "cars/5.png"]
    root = fill(tmp_path / "images", names)
    message = r"animals/cat/1.png is in a folder within the class 'animals'.*give the folder above.*nested='merge'"
    with pytest.raises(ConfigError, match=message):
        ImageFolderSource(root)
    assert ImageFolderSource(root, nested="merge").labels.tolist() == [0, 0, 1, 1, 1]
    with pytest.raises(ConfigError, match=message):
        ImageFolderSource(root)
    with pytest.raises(ConfigError, match=r"nested is 'merged'; it must be 'error' or 'merge'\. Did you mean 'merge'"):
        ImageFolderSource(root, nested="merged")
    assert ImageFolderSource(root / "animals").classes == ["cat", "dog"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Makes a folder of five files count as one of many; returns the folder of the kept lists."""
    monkeypatch.setattr("libai_data.data.sources.image_folder._FEW_FILES", 4)
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "indices"


def content(source: ImageFolderSource) -> list[tuple[Path, int]]:
    return [source[index] for index in range(len(source))]


def test_the_list_of_many_files_is_kept_for_later_sources(few: Path, tmp_path: Path) -> None:
    names = ["b/3.png", "a/2.png", "a/1.png", "a/deep/0.png", "b/notes.txt"]
    root = fill(tmp_path / "images", names)
    first = ImageFolderSource(root, nested="merge")
    kept = next(few.glob("*.npy"))
    written = kept.stat()
    again = ImageFolderSource(root, nested="merge")
    assert content(again) == content(first)
    assert [path.relative_to(root).as_posix() for path, _ in content(again)] == sorted(names[:4])
    assert again.fingerprint() == first.fingerprint()
    assert kept.stat().st_mtime_ns == written.st_mtime_ns and kept.stat().st_ino == written.st_ino


@pytest.mark.parametrize("change", ["a/deep/9.png", "c/9.png", "a/deep/er/9.png"])
def test_a_list_is_made_anew_when_a_file_has_come_or_gone(few: Path, tmp_path: Path, change: str) -> None:
    names = ["b/3.png", "a/2.png", "a/1.png", "a/deep/0.png", "a/deep/1.png"]
    root = fill(tmp_path / "images", names)
    before = ImageFolderSource(root, nested="merge")
    fill(root, [change])
    more = ImageFolderSource(root, nested="merge")
    assert [path.relative_to(root).as_posix() for path, _ in content(more)] == sorted([*names, change])
    assert more.fingerprint() != before.fingerprint()
    (root / change).unlink()
    assert content(ImageFolderSource(root, nested="merge")) == content(before)


def test_a_folder_that_cannot_be_listed_is_named() -> None:
    # Where pytest keeps its folders, no other user can look.
    with tempfile.TemporaryDirectory() as root:
        fill(Path(root), ["a/1.png", "b/secret/2.png"])
        os.chmod(root, 0o755)
        os.chmod(f"{root}/b/secret", 0)
        user = os.geteuid()
        os.seteuid(user or NOBODY)
        try:
            with pytest.raises(ConfigError, match=r"the folder .*/b/secret cannot be listed \(Permission denied\)"):
                ImageFolderSource(root, nested="merge")
        finally:
            os.seteuid(user)
            os.chmod(f"{root}/b/secret", 0o755)


def test_a_class_whose_link_leads_nowhere_is_named_and_does_not_change_the_numbers_of_others(tmp_path: Path) -> None:
    root = fill(tmp_path, ["dog/1.png"])
    os.symlink("/not/mounted", root / "cat")
    with pytest.raises(ConfigError, match=r"/cat is a link whose target /not/mounted does not exist"):
        ImageFolderSource(root)


def test_a_link_that_leads_to_itself_is_named(tmp_path: Path) -> None:
    os.symlink("self", fill(tmp_path, ["a/1.png"]) / "a" / "self")
    with pytest.raises(ConfigError, match=r"/a/self cannot be listed \(Too many levels of symbolic links\)"):
        ImageFolderSource(tmp_path)


def test_a_folder_of_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="each image would need its own request; write the images into shards"):
        ImageFolderSource("s3://bucket/images")


@pytest.mark.parametrize("many", [False, True])
def test_files_of_other_names_and_places_are_counted_in_a_warning_with_the_classes_that_they_leave_empty(
    request: pytest.FixtureRequest, tmp_path: Path, many: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if many:
        request.getfixturevalue("few")
    names = [
        "a/1.png",
        "a/2.GIF",
        "a/3.pgm",
        "a/4.ppm",
        "b/1.heic",
        "b/2.heic",
        "c/.hidden",
        "montage.png",
        ".x.png",
        "readme.md",
    ]
    root = fill(tmp_path / "images", names)
    for _ in range(2):  # The second time, the list is known.
        caplog.clear()
        assert ImageFolderSource(root).labels.tolist() == [0, 0, 0, 0]
        [record] = caplog.records
        assert record.getMessage().startswith(f"3 files in {root} are left out, such as 'b/1.heic': they")
        assert record.getMessage().endswith(".pnm. So these classes have no images: ['b'].")


def test_hidden_files_and_folders_within_a_class_are_left_out(tmp_path: Path) -> None:
    names = ["a/1.png", "a/._1.png", "a/.ipynb_checkpoints/1-checkpoint.png", "a/sub/2.png", "a/sub/.thumbs/2.png"]
    source = ImageFolderSource(fill(tmp_path, names), nested="merge")
    assert [str(path.relative_to(tmp_path)) for path, _ in content(source)] == ["a/1.png", "a/sub/2.png"]
