"""The states of a rank's random generators: Python's, numpy's, OneFlow's, and those that modules own (Dropout).

OneFlow 0.9 tells a state in which draws leave no trace. But a seed decides all draws after it. So with each checkpoint
its generators begin again from a seed that follows from their first one and the step: the run that goes on, and one
that is resumed, draw the same.
"""

from __future__ import annotations

import base64
import logging
import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from libai_data.data.random.generator_states import generators_in_turn
from libai_data.delivery.gather import digest_of
from libai_data.mesh.current import broadcast_py_object, get_rank, get_world_size

logger = logging.getLogger(__name__)


class RandomStates:
    """The generators of this rank, also those that parts of the model own."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # Known when it is first asked for: until then, the user may seed.
        self._first_seeds: dict[str, Any] | None = None

    def gather(self, iteration: int) -> list[dict[str, Any]]:
        """The states of all ranks as JSON can hold them; OneFlow's generators begin anew. Collective."""
        if self._first_seeds is None:
            self._first_seeds = _seeds_of(self._model)
        own = {**_python_and_numpy(), "oneflow": self._first_seeds}
        self._begin_anew(iteration)
        return [broadcast_py_object(own, src=rank) for rank in range(get_world_size())]

    def restore(self, states: list[dict[str, Any]], iteration: int) -> None:
        """Continue with the states that were saved, if as many ranks run now as then; else keep the present ones.

        A compiled graph's own generators cannot be reached: its dropout begins anew.

        What is drawn per sample does not depend on these (`libai_data.data.random`); what a model draws, such as
        dropout, does.
        """
        if len(states) != get_world_size():
            logger.info(
                "The checkpoint was written by %d ranks, %d run now: random generators of ranks start from the seed.",
                len(states),
                get_world_size(),
            )
            return
        own = states[get_rank()]
        _set_python_and_numpy(own)
        self._first_seeds = own["oneflow"]
        self._begin_anew(iteration)

    def _begin_anew(self, iteration: int) -> None:
        """Seed OneFlow's generators.

        Those with equal seeds on several ranks get equal ones: they must where a tensor is broadcast, since each rank
        draws its copy's mask itself.
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
