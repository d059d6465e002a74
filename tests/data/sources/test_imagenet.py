"""ImageNet as folders and as the archives that are published."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from libai_data.data.datasets.image_datasets import ImageNetDataset
from libai_data.data.sources.imagenet_tar import TRAIN_TAR, VAL_LABELS, VAL_TAR, ImageNetTarSource
from libai_data.errors import ConfigError, FormatError
from tests.data.sources.published_files import jpeg, tar_of

LEVELS = {"n03": [30, 31], "n01": [10, 11, 12], "n02": [20]}
VAL = {"ILSVRC2012_val_00000002.JPEG": ("n01", 50), "ILSVRC2012_val_00000001.JPEG": ("n03", 60)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIBAI_DATA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    root = tmp_path / "archives"
    root.mkdir()
    (root / TRAIN_TAR).write_bytes(
        tar_of(
            {
                f"{name}.tar": tar_of({f"{name}_{level}.JPEG": jpeg(level) for level in levels})
                for name, levels in LEVELS.items()
            }
        )
    )
    (root / VAL_TAR).write_bytes(tar_of({name: jpeg(level) for name, (_, level) in VAL.items()}))
    (root / VAL_LABELS).write_text("".join(f"{VAL[name][0]}\n" for name in sorted(VAL)))
    return root


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    files: dict[str, bytes] = {
        f"train/{name}/{name}_{level}.JPEG": jpeg(level) for name, levels in LEVELS.items() for level in levels
    }
    files.update({f"val/{label}/{name}": jpeg(level) for name, (label, level) in VAL.items()})
    for name, data in files.items():
        path = tmp_path / "folders" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "folders/val/n02").mkdir()
    return tmp_path / "folders"


def test_archives_and_folders_give_the_same_images_and_labels(archives: Path, folders: Path) -> None:
    for root in (archives, folders):
        dataset = ImageNetDataset(root=str(root), train=True)
        samples = [dataset[index] for index in range(len(dataset))]
        assert [int(sample.labels.tensor) for sample in samples] == [0, 0, 0, 1, 2, 2]
        levels = [round(float(sample.images.tensor.mean()) * 255) for sample in samples]
        assert levels == [10, 11, 12, 20, 30, 31]
        assert samples[0].images.tensor.shape == (3, 18, 24) and samples[0].labels.placement_idx == -1
    for root in (archives, folders):
        dataset = ImageNetDataset(root, train=False)
        found = {
            round(float(dataset[index].images.tensor.mean()) * 255): int(dataset[index].labels.tensor)
            for index in range(len(dataset))
        }
        assert found == {50: 0, 60: 2}


@pytest.mark.parametrize(("lacks", "train"), [("val", True), ("val", False), ("train", False)])
def test_folders_of_which_one_lacks_a_class_are_refused(folders: Path, lacks: str, train: bool) -> None:
    for path in (folders / lacks / "n02").glob("*"):
        path.unlink()
    (folders / lacks / "n02").rmdir()
    with pytest.raises(ConfigError, match=rf"/\w+ has the class 'n02', but .*/{lacks} does not \(1 such classes\)"):
        ImageNetDataset(folders, train=train)


def test_the_places_of_images_are_found_once(archives: Path, cache: Path) -> None:
    first = ImageNetTarSource(archives)
    kept = next((cache / "indices").glob("*.npy"))
    written = kept.stat().st_mtime_ns
    again = pickle.loads(pickle.dumps(ImageNetTarSource(archives)))
    assert kept.stat().st_mtime_ns == written
    assert again.classes == first.classes == ("n01", "n02", "n03")
    assert [again.read(index) for index in range(6)] == [first.read(index) for index in range(6)]
    assert again.fingerprint() == first.fingerprint()


def test_labels_may_stand_beside_names_and_elsewhere(archives: Path) -> None:
    labels = archives / "map.txt"
    labels.write_text("".join(f"{name} {label}\n" for name, (label, _) in VAL.items()))
    (archives / VAL_LABELS).unlink()
    with pytest.raises(ConfigError, match=r"there is no .*synset_labels\.txt.*val_labels"):
        ImageNetDataset(archives, train=False)
    dataset = ImageNetDataset(archives, train=False, val_labels=labels)
    assert [int(dataset[index].labels.tensor) for index in range(2)] == [0, 2]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("n01\n", "has 1 lines for 2 images"),
        ("n01\nn02 x\n", "expected a class"),
        ("n01\nn09\n", "names the class n09"),
        ("other.JPEG n01\nILSVRC2012_val_00000001.JPEG n01\n", "has no line for ILSVRC2012_val_00000002.JPEG"),
    ],
)
def test_labels_that_do_not_fit_are_refused(archives: Path, text: str, told: str) -> None:
    (archives / VAL_LABELS).write_text(text)
    with pytest.raises(FormatError, match=told):
        ImageNetDataset(archives, train=False)


def test_an_archive_cut_short_is_refused_with_the_offset(archives: Path) -> None:
    data = (archives / TRAIN_TAR).read_bytes()
    (archives / TRAIN_TAR).write_bytes(data[: len(data) // 2])
    with pytest.raises(FormatError, match=r"ILSVRC2012_img_train\.tar at offset [0-9]+: the archive is cut short"):
        ImageNetDataset(archives)
    (archives / TRAIN_TAR).write_bytes(tar_of({"a.JPEG": b"x"}))
    with pytest.raises(FormatError, match="contains no archives of classes"):
        ImageNetDataset(archives)


def test_a_broken_image_is_named_with_its_archive(archives: Path) -> None:
    (archives / VAL_TAR).write_bytes(tar_of(dict.fromkeys(VAL, b"no image")))
    with pytest.raises(FormatError, match=r"ILSVRC2012_val_00000002\.JPEG in .*val\.tar cannot be read as an image"):
        ImageNetDataset(archives, train=False, transform=np.asarray)[0]


def test_a_folder_with_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*ILSVRC2012_img_val\.tar, and no folder .*/val; put one"):
        ImageNetDataset(tmp_path, train=False)
