from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from libai_data.mesh.current import set_mesh
from tests.engine.tiny import TinyModel, on_one_rank


@pytest.fixture(autouse=True)
def neither_mesh_nor_log_is_left() -> Iterator[None]:
    """What `default_setup` sets for a whole job ends with the test."""
    yield
    set_mesh(None)
    logger = logging.getLogger("libai_data")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)


@pytest.fixture()
def model() -> TinyModel:
    """The tiny model, for evaluations."""
    found: TinyModel = on_one_rank(TinyModel())
    return found
