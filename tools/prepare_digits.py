"""Write scikit-learn's handwritten digits as an image folder: `python tools/prepare_digits.py data/digits`.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository (1998).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from libai_data.atomic_files import output_path, written_together

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
    """
    if (root / "train").is_dir():
        return False
    from sklearn.datasets import load_digits

    digits = load_digits()
    with written_together(root) as unfinished:
        for number, (picture, digit) in enumerate(zip(digits.images, digits.target)):
            folder = unfinished / ("test" if number % _TEST_EVERY == 0 else "train") / str(digit)
            folder.mkdir(parents=True, exist_ok=True)
            pixels = np.round(picture * (255 / 16)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number:04d}.png")
    return True


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: write the digits into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "root", type=output_path, nargs="?", default="data/digits", help="folder (default: %(default)s)"
    )
    root = parser.parse_args(argv).root
    print(f"{'Wrote' if write_digits(root) else 'Found'} the digits in {root}")


if __name__ == "__main__":
    main()
