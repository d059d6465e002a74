"""The states of a rank's random generators: Python's, numpy's, OneFlow's, and those that modules own (Dropout).

The state that OneFlow 0.9 reports does not change with draws. But a seed decides all later draws. So at each
checkpoint, OneFlow's generators get a new seed, computed from their first seed and the step. The run that continues
and a resumed run then draw the same numbers.
"""

from __future__ import annotations

import base64
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from libai_data.data.random.generator_states import generators_in_turn
from libai_data.delivery.gather import digest_of
from libai_data.errors import CheckpointError, error_text
from libai_data.mesh.current import broadcast_py_object, get_rank, get_tensor_parallel_size, get_world_size

logger = logging.getLogger(__name__)


class RandomStates:
    """The generators of this rank, also those that parts of the model own."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # Read at the first checkpoint, because the user may seed the generators until then.
        self._first_seeds: dict[str, Any] | None = None

    def gather(self, iteration: int) -> list[dict[str, Any]]:
        """The states of all ranks as JSON values. This also gives OneFlow's generators a new seed. Collective."""
        if self._first_seeds is None:
            self._first_seeds = _seeds_of(self._model)
        own = {**_python_and_numpy(), "oneflow": self._first_seeds}
        self._reseed(iteration)
        return [broadcast_py_object(own, src=rank) for rank in range(get_world_size())]

    def restore(self, states: Any, iteration: int, path: Path) -> None:
        """Restore the saved states if the number of ranks is the same as before; else keep the present states.

        The generators of a compiled graph cannot be restored, so its dropout masks restart. Draws per sample do not
        depend on these generators (`libai_data.data.random`), but draws of a model do. `path` has the states.
        """
        if not isinstance(states, list):
            raise CheckpointError(f"{path} is {states!r:.200}; it must be a list with the state of each rank")
        if len(states) != get_world_size():
            logger.info(
                f"The checkpoint was written by {len(states)} ranks, but {get_world_size()} run now: the random "
                "generators of the ranks start again from the seed."
            )
            return
        try:
            own = states[get_rank()]
            _set_python_and_numpy(own)
            # Those of the first rank of the tensor-parallel group, because the mesh may have been another one.
            tensor = get_tensor_parallel_size()
            self._first_seeds = dict(states[get_rank() // tensor * tensor]["oneflow"])
            self._reseed(iteration)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state of rank {get_rank()} in {path} cannot be restored: {error_text(error)}"
            ) from error

    def _reseed(self, iteration: int) -> None:
        """Seed OneFlow's generators.

        Generators with equal seeds on several ranks get equal new seeds. Broadcast tensors require this, because each
        rank draws the mask of its own copy.
        """
        import oneflow as flow

        assert self._first_seeds is not None  # its two callers set it
        seed = digest_of(f"{self._first_seeds['default']}/{iteration}".encode())
        with generators_in_turn():
            flow.manual_seed(seed)
            if flow.cuda.is_available():
                flow.cuda.manual_seed_all(seed)
            for name, generator in _generators(self._model):
                if name in self._first_seeds["modules"]:
                    first = self._first_seeds["modules"][name]
                    generator.manual_seed(digest_of(f"{first}/{iteration}/{name}".encode()))


def seed_modules(model: Any, seed: int) -> None:
    """Seed the generators that modules own, unless other code has: OneFlow 0.9 gives all of them one seed, in each run.

    The seeds depend on `seed` and the name of the module. They are equal on all ranks, as `_reseed` requires.
    """
    import oneflow as flow

    with generators_in_turn():
        of_flow = flow.Generator().initial_seed()
        for name, generator in _generators(model):
            if generator.initial_seed() == of_flow:
                generator.manual_seed(digest_of(f"{seed}/{name}".encode()))


def _seeds_of(model: Any) -> dict[str, Any]:
    import oneflow as flow

    with generators_in_turn():
        modules = {name: generator.initial_seed() for name, generator in _generators(model)}
        return {"default": flow.initial_seed(), "modules": modules}


def _generators(model: Any) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        generator = getattr(module, "generator", None)
        if callable(getattr(generator, "manual_seed", None)):
            yield name, generator


def _python_and_numpy() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {
        "python": [version, _encode(np.asarray(words, np.uint32)), gauss],
        "numpy": [name, _encode(keys), int(position), int(has_gauss), float(cached)],
    }


def _set_python_and_numpy(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(int(word) for word in _decode(words, np.uint32)), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    legacy: tuple[Any, ...] = (name, _decode(keys, np.uint32), position, has_gauss, cached)
    np.random.set_state(legacy)


def _encode(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _decode(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()
