"""A tokenizer for conversations."""

from __future__ import annotations

from pathlib import Path

import pytest

from libai_data.data.text.tokenizer import TextTokenizer, TokenizerFiles
from tests.data.datasets.chats import tokenizer_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("chat") / "tokenizer")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return TokenizerFiles(str(folder)).load()
