"""The UCI handwritten digits that scikit-learn ships, written out as an image folder of PNG files.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository (1998).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from libai_data.sources.whole_folder import written_together

_TEST_EVERY = 5


def write_digits(root: Path) -> bool:
    """Write 1,797 greyscale pictures of 8x8 pixels as `<root>/{train,test}/<digit>/<number>.png`, unless they are
    there.

    Every fifth picture is for testing. The folder appears whole or not at all.

    Args:
        root: the folder to make.

    Returns:
        Whether it was written now.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
        FileExistsError: The folder is there, but is not what this function writes.
    """
    if root.exists():
        if _is_complete(root):
            return False
        raise FileExistsError(f"{root} is there but holds no train/ and test/; move it away or name another folder")
    from sklearn.datasets import load_digits

    digits = load_digits()
    try:
        with written_together(root) as unfinished:
            for number, (picture, digit) in enumerate(zip(digits.images, digits.target)):
                folder = unfinished / ("test" if number % _TEST_EVERY == 0 else "train") / str(digit)
                folder.mkdir(parents=True, exist_ok=True)
                pixels = np.round(picture * (255 / 16)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number:04d}.png")
    except OSError:
        if not _is_complete(root):  # otherwise another process was faster
            raise
        return False
    return True


def _is_complete(root: Path) -> bool:
    return (root / "train").is_dir() and (root / "test").is_dir()


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: write the digits into a folder."""
    parser = argparse.ArgumentParser(
        description="Write scikit-learn's handwritten digits as an image folder of PNG files."
    )
    parser.add_argument("root", type=Path, nargs="?", default=Path("data/digits"), help="folder (default: %(default)s)")
    root = parser.parse_args(arguments).root
    print(f"{'Wrote' if write_digits(root) else 'Found'} the digits in {root}")


if __name__ == "__main__":
    main()
