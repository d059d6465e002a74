"""Labelled images become shards that the formats' own readers decode to the same images and labels."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from PIL import Image

from libai_data.commands.conversion import Conversion, convert
from libai_data.commands.conversion.conversion import ConversionError
from libai_data.commands.conversion.shard_writers import FORMATS, schema_of
from libai_data.data.sources import ImageFolderSource, open_source
from libai_data.errors import ConfigError, SchemaError
from tests.data.sources.published_files import cifar_image, write_cifar10
from tests.properties import slowly

pytest.importorskip("pyarrow")

Images = list[tuple[np.ndarray, int]]


def photographs(root: Path) -> Images:
    """A folder of two classes of pictures; what a reader must see of them."""
    found: Images = []
    for label, name in enumerate(("cat", "dog")):
        for number in range(3):
            path = root / name / f"a.{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(len(found)).integers(0, 256, (5, 4, 3), np.uint8)
            Image.fromarray(pixels).save(path)
            found.append((pixels, label))
    return found


def cifar10(root: Path) -> Images:
    write_cifar10(root)
    return [(cifar_image(image), image % 10) for image in range(10)]


WRITERS = {"image_folder": photographs, "cifar10": cifar10}


def assert_same(found: list[tuple[Any, int]], expected: Images) -> None:
    assert [label for _, label in found] == [label for _, label in expected]
    for (image, _), (pixels, _) in zip(found, expected):
        np.testing.assert_array_equal(np.asarray(image), pixels)


@pytest.mark.parametrize("kind", [slowly("image_folder"), slowly("cifar10")])
def test_images_become_shards_that_webdataset_and_pyarrow_decode(tmp_path: Path, kind: str) -> None:
    webdataset = pytest.importorskip("webdataset")
    from pyarrow import parquet

    write: Callable[[Path], Images] = WRITERS[kind]
    expected = write(tmp_path / "images")

    def shards(to: str) -> list[str]:
        conversion = Conversion([str(tmp_path / "images")], to, tmp_path / to, format=kind, records_per_shard=4)
        return convert(conversion, workers=2 if to == "parquet" else 1).paths

    samples = [
        sample
        for path in shards("webdataset")
        for sample in webdataset.WebDataset(path, shardshuffle=False).decode("rgb8")
    ]
    assert_same([(sample["png"], sample["cls"]) for sample in samples], expected)
    rows = [row for path in shards("parquet") for row in parquet.read_table(path).to_pylist()]
    assert_same([(Image.open(io.BytesIO(row["png"])), row["cls"]) for row in rows], expected)


def test_an_image_that_lies_in_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    photographs(tmp_path)
    source = ImageFolderSource(tmp_path)
    for index, record in enumerate(open_source(tmp_path, "image_folder")):
        assert record["png"] == source[index][0].read_bytes()


def test_images_of_several_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"one folder at a time, not from .'a', 'b'."):
        open_source(["a", "b"], "image_folder")


def test_a_field_that_the_first_records_do_not_have_is_not_left_out_of_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 2000 + '{"text": "b", "late": 1}\n')
    with pytest.raises(ConversionError, match=r"fields \['late'\]"):
        convert(Conversion([str(path)], "parquet", tmp_path / "out"))


@pytest.mark.parametrize(
    ("first", "later", "changed"),
    [
        ({"x": {"a": 1}}, {"x": {"a": 1, "late": 2}}, r"would lose its field 'x\.late'"),
        ({"x": [{"a": {"b": 1}}, None]}, {"x": [None, {"a": {"b": 1, "late": 2}}]}, r"lose its field 'x\.a\.late'"),
        ({"x": 1, "y": 1.5}, {"x": 2.5, "y": 1}, r"would have 2 instead of 2\.5 in its field 'x'"),
        ({"x": {"a": [[1]]}}, {"x": {"a": [[1, 2], [3, 0.5]]}}, r"would have 0 instead of 0\.5 in its field 'x\.a'"),
        ({"x": 0.5}, {"x": True}, r"would have 1\.0 instead of True in its field 'x'"),
        ({"x": {"a": [[0.5]]}}, {"x": {"a": [[1.0, False]]}}, r"would have 0\.0 instead of False in its field 'x\.a'"),
        ({"x": ["a"]}, {"x": "a"}, r"would have \['a'\] instead of 'a' in its field 'x'"),
    ],
)
def test_a_record_that_the_columns_of_parquet_would_change_is_refused(
    tmp_path: Path, first: Any, later: Any, changed: str
) -> None:
    form = FORMATS["parquet"]
    writer = form.writer(tmp_path / "a.parquet", schema_of("parquet", lambda: [first]))
    without: dict[str, Any] = dict.fromkeys(first)
    writer.write([first, {**without, "y": math.nan} if "y" in first else without, {}], 0)
    with pytest.raises(SchemaError, match=f"record 4 .*{changed}, by the columns of the first records"):
        writer.write([first, later], 3)
    writer.close()
    assert form.source(tmp_path / "a.parquet")[0] == first
