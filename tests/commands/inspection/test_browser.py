"""A browser shows the page as it is meant, without a network, and runs nothing of what the data hold."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from libai_data.commands.inspection import inspect_config, page_of
from libai_data.config import LazyCall
from tests.commands.inspection.data import Sentences, Words, config_with
from tests.deadline import run_to_end

BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)

pytestmark = pytest.mark.skipif(
    BROWSER is None,
    reason=f"NOT TESTED IN A BROWSER: none of {', '.join(BROWSERS)} is on the PATH (apt-get install {BROWSERS[1]})",
)

HOSTILE = "<img src=x onerror=document.body.remove()><script>document.body.remove()</script>"


def browse(folder: Path, *arguments: str) -> Any:
    """Open `page.html` of a folder, without a network."""
    command: list[str] = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
        *arguments,
        (folder / "page.html").as_uri(),
    ]
    environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin"}
    return run_to_end(command, 90, check=True, env=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of sentences with a warning, on a mesh of 2 x 2 ranks."""
    folder = tmp_path_factory.mktemp("browser")
    cfg = config_with(LazyCall(Sentences)(), data_parallel_size=2, tensor_parallel_size=2)
    cfg.tokenization = {"tokenizer": LazyCall(Words)()}
    cfg.model.vocab_size = 15
    (folder / "page.html").write_text(page_of(inspect_config(cfg, title=HOSTILE)), encoding="utf-8")
    return folder


def test_the_browser_finds_all_sections_and_nothing_to_complain_of(folder: Path) -> None:
    shown = browse(folder, "--dump-dom")
    for section in ("warnings", "samples", "fields", "mesh", "histograms", "timings"):
        assert f'id="{section}"' in shown.stdout
    assert "the model has 15 tokens" in shown.stdout
    assert "<script" not in shown.stdout
    complaints = [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
    assert not complaints


def test_words_ranks_and_warnings_have_their_colours(folder: Path) -> None:
    browse(folder, f"--screenshot={folder / 'shot.png'}", "--window-size=1240,3000")
    pixels = np.asarray(Image.open(folder / "shot.png").convert("RGB"))
    assert pixels.shape == (3000, 1240, 3)
    for what, colour, least in (
        ("words that the loss counts", (0xFF, 0xD7, 0x6E), 2000),
        ("data rank 0", (0x2B, 0x6C, 0xB0), 1000),
        ("data rank 1", (0xC0, 0x56, 0x21), 1000),
        ("bars of histograms", (0x3E, 0x6F, 0xB0), 1000),
        ("the frame of the warnings", (0xD6, 0x9E, 0x2E), 100),
    ):
        assert (pixels == colour).all(axis=-1).sum() > least, what
