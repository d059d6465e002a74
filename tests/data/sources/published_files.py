"""Files in the layouts in which CIFAR, MNIST and ImageNet are published, made by the formats' descriptions alone."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from collections.abc import Iterable, Mapping
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from PIL import Image


def pixel(image: int, channel: int, row: int, column: int) -> int:
    """A level that tells which one it is."""
    return (image * 7 + channel * 50 + row * 3 + column) % 256


def cifar_image(image: int) -> np.ndarray:
    """uint8 [32, 32, 3]."""
    return np.array([[[pixel(image, c, y, x) for c in range(3)] for x in range(32)] for y in range(32)], np.uint8)


def cifar_record(image: int, labels: list[int]) -> bytes:
    """One image of a .bin file: its labels, then all of red, of green and of blue."""
    planes = [pixel(image, c, y, x) for c in range(3) for y in range(32) for x in range(32)]
    return struct.pack(f"{len(labels)}B{len(planes)}B", *labels, *planes)


def write_cifar10(root: Path, per_file: int = 2) -> Path:
    """Image n has the class n mod 10; those to test with come after those to train with."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    for file, name in enumerate(names):
        images = range(file * per_file, (file + 1) * per_file)
        (folder / name).write_bytes(b"".join(cifar_record(image, [image % 10]) for image in images))
    (folder / "batches.meta.txt").write_text("".join(f"class{number}\n" for number in range(10)) + "\n")
    return folder


def write_cifar100(root: Path, images: int = 3) -> Path:
    """Image n has the coarse class n and the fine one 99 - n."""
    folder = root / "cifar-100-binary"
    folder.mkdir(parents=True)
    for name in ("train.bin", "test.bin"):
        (folder / name).write_bytes(b"".join(cifar_record(image, [image, 99 - image]) for image in range(images)))
    (folder / "fine_label_names.txt").write_text("".join(f"fine{number}\n" for number in range(100)))
    (folder / "coarse_label_names.txt").write_text("".join(f"coarse{number}\n" for number in range(20)))
    return folder


def idx(values: np.ndarray) -> bytes:
    """An IDX file of unsigned bytes."""
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def mnist_files(train: int = 5, test: int = 3) -> dict[str, bytes]:
    """The four files; image n to train with has the class n mod 10, to test with the class (n + 1) mod 10."""
    made: dict[str, bytes] = {}
    for part, count, shift in (("train", train, 0), ("t10k", test, 1)):
        images = np.arange(count * 28 * 28).reshape(count, 28, 28).astype(np.uint8)
        made[f"{part}-images-idx3-ubyte"] = idx(images)
        made[f"{part}-labels-idx1-ubyte"] = idx((np.arange(count, dtype=np.uint8) + shift) % 10)
    return made


def write_mnist(folder: Path, compressed: bool = False, **counts: int) -> Path:
    """Write the four files into a folder."""
    folder.mkdir(parents=True)
    for name, data in mnist_files(**counts).items():
        (folder / f"{name}{'.gz' * compressed}").write_bytes(gzip.compress(data) if compressed else data)
    return folder


def jpeg(level: int, size: tuple[int, int] = (24, 18)) -> bytes:
    """A picture of one grey level, by Pillow."""
    stream = io.BytesIO()
    Image.new("RGB", size, (level, level, level)).save(stream, "JPEG", quality=95)
    return stream.getvalue()


def tar_of(files: Mapping[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    """An archive."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


class WebFolder:
    """A folder that a web server on loopback gives, but `denied`; `asked` are the paths that were asked for by GET.
    `busy` says for each of the first requests whether it is answered by 503."""

    def __init__(self, folder: Path, denied: str = "", busy: Iterable[bool] = ()) -> None:
        self.asked: list[str] = []
        asked, is_busy = self.asked, iter(busy)

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments, directory=str(folder))

            def do_GET(self) -> None:
                asked.append(self.path)
                super().do_GET()

            def send_head(self) -> Any:
                if next(is_busy, False):
                    return self.send_error(503)
                return self.send_error(403) if self.path == denied else super().send_head()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
