"""Mixup and CutMix: images mixed in pairs, and their labels in the same shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from libai_data.data.attributes import batch_method_of
from libai_data.data.items import array_in, named
from libai_data.data.random.sample_random import BatchRandom
from libai_data.data.transforms.batch import BatchTransform
from libai_data.data.transforms.libraries import opencv
from libai_data.errors import ConfigError, SchemaError
from libai_data.errors.argument_rules import check, check_types, one_of, real, whole
from libai_data.mesh.arrays import as_array
from libai_data.structures import DistTensorData, Instance

IMAGES = "images"
LABELS = "labels"
_MOST_CHANNELS = 4
_RULES = {
    "mode": one_of("batch", "pair", "elem"),
    "prob": real(0, 1),
    "switch_prob": real(0, 1),
    "num_classes": whole(1),
    **dict.fromkeys(("mixup_alpha", "cutmix_alpha"), real(0, 1e9)),
}


class _Mix(NamedTuple):
    """How a row is mixed with its partner."""

    own: float = 1.0  # share of the row itself; the rest is the share of its partner
    # The box that is the partner's: top, bottom, left, right, in pixels; None if the whole image is blended.
    box: tuple[int, int, int, int] | None = None


class Mixup(BatchTransform):
    """Mixes the images of neighbouring rows of the global batch: row 0 with row 1, row 2 with row 3, and so on.

    The rows of a pair are always on one rank, and the order of the rows is random. So the result is the same on every
    layout, and no data is sent. The arguments are the same as those of Mixup in timm and flowvision, which LiBai uses.
    The fields `images` (float32 [C, H, W], or uint8 [H, W, C] or [H, W]) and `labels` (integer []) are needed; labels
    become float32 [num_classes].

    Args:
        mixup_alpha: parameter of the Beta distribution of the shares when two images are blended; 0 never blends.
            Source: H. Zhang et al., "mixup: Beyond Empirical Risk Minimization" (ICLR 2018).
        cutmix_alpha: parameter of the Beta distribution of the areas when a box of one image replaces a box of the
            other; 0 never cuts. Source: S. Yun et al., "CutMix" (ICCV 2019), algorithm A1.
        cutmix_minmax: smallest and largest height and width of the box, as a fraction of the image, instead of
            `cutmix_alpha`.
        prob: probability that anything is mixed.
        switch_prob: probability of CutMix if both are on.
        mode: "batch" draws once for a batch, "pair" for each pair of rows, "elem" for each row.
        label_smoothing: see `SoftLabels`.
        num_classes: how many classes there are.

    Raises:
        ConfigError: An argument is out of range, or both Mixup and CutMix are off.
    """

    rows_together = 2

    def __init__(
        self,
        mixup_alpha: float = 1.0,
        cutmix_alpha: float = 0.0,
        cutmix_minmax: Sequence[float] | None = None,
        prob: float = 1.0,
        switch_prob: float = 0.5,
        mode: str = "batch",
        label_smoothing: float = 0.1,
        num_classes: int = 1000,
    ) -> None:
        check_types(Mixup, locals(), _RULES)
        if cutmix_minmax is not None:
            if len(cutmix_minmax) != 2 or not 0 <= cutmix_minmax[0] <= cutmix_minmax[1] <= 1:
                raise ConfigError(f"cutmix_minmax is {list(cutmix_minmax)}; it must be [least, largest], from 0 to 1")
            cutmix_alpha = 1.0
        if max(mixup_alpha, cutmix_alpha) == 0:
            raise ConfigError("mixup_alpha and cutmix_alpha are 0; at least one must be above 0")
        SoftLabels((), num_classes, label_smoothing)
        self.mixup_alpha = mixup_alpha
        self.cutmix_alpha = cutmix_alpha
        self.cutmix_minmax = None if cutmix_minmax is None else (float(cutmix_minmax[0]), float(cutmix_minmax[1]))
        self.prob = prob
        self.switch_prob = switch_prob
        self.mode = mode
        self.label_smoothing = label_smoothing
        self.num_classes = num_classes

    def prepared(self, dataset: Any) -> SoftLabels:
        """The dataset with labels that can be mixed."""
        return SoftLabels(dataset, self.num_classes, self.label_smoothing)

    def __call__(self, fields: dict[str, np.ndarray], random: BatchRandom) -> None:
        """Mix rows in pairs; see `BatchTransform`. A SchemaError if there are no images of a supported form."""
        if IMAGES not in fields:
            raise SchemaError(f"to mix images, samples need a field '{IMAGES}'; they have {list(fields)}")
        images, labels = fields[IMAGES], fields[LABELS]
        ends = images.shape[1::2] if images.ndim == 4 else (1, 1)
        channels, side = ends if images.dtype.kind == "f" else ends[::-1]
        # CutMix would cut its box out of the channels of uint8 [3, H, W], as torchvision reads images.
        is_turned = side <= _MOST_CHANNELS < channels
        if is_turned or (images.dtype, images.ndim) not in ((np.float32, 4), (np.uint8, 3), (np.uint8, 4)):
            raise SchemaError(
                f"field '{IMAGES}' is {images.dtype} {list(images.shape[1:])}; to be mixed, images must be float32 "
                "[C, H, W] or uint8 [H, W, C]"
            )
        plane = images.shape[2:4] if images.dtype.kind == "f" else images.shape[1:3]
        mixes = self._mixes(random, len(images), (int(plane[0]), int(plane[1])))
        for row in range(0, len(images), 2):
            _mix_pair(images[row : row + 2], labels[row : row + 2], mixes[row : row + 2])

    def _mixes(self, random: BatchRandom, rows: int, plane: tuple[int, int]) -> list[_Mix]:
        if self.mode == "batch":
            return [self._draw(random.of_batch(), plane)] * rows
        if self.mode == "elem":
            return [self._draw(random.of_row(row), plane) for row in range(rows)]
        drawn = [self._draw(random.of_row(row), plane) for row in range(0, rows, 2)]
        return [mix for mix in drawn for _ in range(2)]

    def _draw(self, generator: np.random.Generator, plane: tuple[int, int]) -> _Mix:
        if generator.random() >= self.prob:
            return _Mix()
        if not self.cutmix_alpha or (self.mixup_alpha and generator.random() >= self.switch_prob):
            return _Mix(generator.beta(self.mixup_alpha, self.mixup_alpha))
        top, bottom, left, right = self._box(generator, *plane)
        return _Mix(1 - (bottom - top) * (right - left) / (plane[0] * plane[1]), (top, bottom, left, right))

    def _box(self, generator: np.random.Generator, height: int, width: int) -> tuple[int, int, int, int]:
        if self.cutmix_minmax is not None:
            least, largest = self.cutmix_minmax
            sizes = [int(generator.integers(int(size * least), int(size * largest) + 1)) for size in (height, width)]
            top, left = (int(generator.integers(0, whole - own + 1)) for whole, own in zip((height, width), sizes))
            return top, top + sizes[0], left, left + sizes[1]
        side = math.sqrt(1 - generator.beta(self.cutmix_alpha, self.cutmix_alpha))
        top, bottom = _random_range(generator, height, side)
        return (top, bottom, *_random_range(generator, width, side))


def _random_range(generator: np.random.Generator, size: int, part: float) -> tuple[int, int]:
    """A range of the fraction `part` of `size` pixels, around a random centre, cut off at the borders."""
    half, centre = int(size * part) // 2, int(generator.integers(0, size))
    return max(centre - half, 0), min(centre + half, size)


def _mix_pair(images: np.ndarray, labels: np.ndarray, mixes: Sequence[_Mix]) -> None:
    first, second = images
    # The first image changes before the second one is mixed with it.
    before = first.copy()
    _mix_image(first, second, mixes[0])
    _mix_image(second, before, mixes[1])
    own = np.array([[mix.own] for mix in mixes], np.float32)
    labels[...] = labels * own + labels[::-1] * (1 - own)


def _mix_image(image: np.ndarray, partner: np.ndarray, mix: _Mix) -> None:
    if mix.box is not None:
        rows, columns = slice(*mix.box[:2]), slice(*mix.box[2:])
        box = (rows, columns) if image.dtype == np.uint8 else (slice(None), rows, columns)
        image[box] = partner[box]
    elif mix.own < 1:
        # As one plane, so that OpenCV writes the result directly into the image's memory.
        flat = image.reshape(len(image), -1)
        opencv().addWeighted(flat, mix.own, partner.reshape(len(partner), -1), 1 - mix.own, 0, dst=flat)
        if not image.flags.c_contiguous:  # `flat` is a copy.
            image[...] = flat.reshape(image.shape)


class SoftLabels:
    """A dataset whose field `labels`, the number of a class, becomes a float32 [num_classes] that sums to 1.

    Args:
        dataset: a dataset whose samples have integer `labels` of shape [].
        num_classes: how many classes there are.
        smoothing: fraction of the weight that is spread evenly over all classes. Source: C. Szegedy et al.,
            "Rethinking the Inception Architecture" (CVPR 2016), section 7.
    """

    def __init__(self, dataset: Any, num_classes: int, smoothing: float = 0.0) -> None:
        check(_RULES, num_classes=num_classes)
        if not 0 <= smoothing < 1:
            raise ConfigError(f"label_smoothing is {smoothing}; it must be at least 0 and below 1")
        self.dataset = dataset
        self.num_classes = num_classes
        self.smoothing = smoothing

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self._softened(self.dataset[index])

    @property
    def __getitems__(self) -> Callable[[list[int]], list[Any]]:
        get_items = self._read_by("__getitems__")
        return lambda indices: [self._softened(sample) for sample in get_items(indices)]

    @property
    def read_batch(self) -> Callable[[np.ndarray, Mapping[str, np.ndarray]], None]:
        """The dataset's `read_batch`, with soft labels, if the dataset has one that reads whole samples."""
        read = self._read_by("read_batch")

        def read_batch(indices: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
            numbers = np.full(len(indices), -1)
            read(indices, {**out, LABELS: numbers})
            self._fill(out[LABELS], numbers)

        return read_batch

    def _read_by(self, name: str) -> Callable[..., Any]:
        method = batch_method_of(self.dataset, name)
        if method is None:
            raise AttributeError(f"{type(self.dataset).__name__} has no {name}")
        return method

    def _softened(self, sample: Any) -> Any:
        fields = named(sample)
        if LABELS not in fields:
            raise SchemaError(
                f"to mix images, samples need a field '{LABELS}'; they have {list(fields)}. Rename theirs, or name the "
                f"values of tuples with fields=['{IMAGES}', '{LABELS}']"
            )
        value = fields[LABELS]
        numbers = as_array(array_in(value), LABELS)
        if numbers.shape != () or numbers.dtype.kind not in "iu":
            raise SchemaError(
                f"field '{LABELS}' is {numbers.dtype} {list(numbers.shape)}; to mix images, it must be the number of a "
                "class, an integer of shape []"
            )
        soft = np.empty((1, self.num_classes), np.float32)
        self._fill(soft, numbers.reshape(1))
        fields[LABELS] = value.with_tensor(soft[0]) if isinstance(value, DistTensorData) else soft[0]
        # Not always an Instance: a batch of tuples unpacks into values.
        return Instance(**fields) if isinstance(sample, Instance) else fields

    def _fill(self, rows: np.ndarray, numbers: np.ndarray) -> None:
        wrong = numbers[(numbers < 0) | (numbers >= self.num_classes)]
        if len(wrong):
            raise SchemaError(
                f"field '{LABELS}' is {wrong[0]}; with num_classes {self.num_classes} it can be 0 to "
                f"{self.num_classes - 1}"
            )
        rows[...] = self.smoothing / self.num_classes
        rows[np.arange(len(rows)), numbers] = 1 - self.smoothing + self.smoothing / self.num_classes
