"""The states of a rank's random generators: Python's, numpy's, OneFlow's, and those that modules own (Dropout)."""

from __future__ import annotations

import base64
import logging
import random
from typing import Any, Dict, Iterator, List, Tuple, cast

import numpy as np

from libai_data.mesh import broadcast_py_object, get_rank, get_world_size

logger = logging.getLogger(__name__)


def gather_random_states(model: Any) -> List[Dict[str, Any]]:
    """The states of all ranks, in the order of ranks. Collective.

    Args:
        model: the module, some of whose parts may own generators.

    Returns:
        For each rank something that JSON can hold.
    """
    own = {**_own_state(), "modules": _module_states(model)}
    return [broadcast_py_object(own, src=rank) for rank in range(get_world_size())]


def restore_random_states(states: List[Dict[str, Any]], model: Any) -> None:
    """Continue with the states that were saved, if as many ranks run now as then; else keep the present ones.

    A compiled graph's own generators cannot be reached: its dropout begins anew.

    What is drawn per sample does not depend on these (`libai_data.sample_random`); what a model draws, such as dropout,
    does.
    """
    if len(states) != get_world_size():
        logger.info(
            "The checkpoint was written by %d ranks, %d run now: random generators of ranks start from the seed.",
            len(states),
            get_world_size(),
        )
        return
    _set_own_state(states[get_rank()])
    _set_module_states(model, states[get_rank()]["modules"])


def _module_states(model: Any) -> Dict[str, str]:
    states = {}
    for name, generator in _generators(model):
        state = generator.get_state()
        # OneFlow draws on from elsewhere than the state it tells; set, it goes on from there, as a resumed run will.
        generator.set_state(state)
        states[name] = _encode(state.numpy())
    return states


def _set_module_states(model: Any, states: Dict[str, str]) -> None:
    import oneflow as flow

    for name, generator in _generators(model):
        if name in states:
            generator.set_state(flow.from_numpy(_decode(states[name], np.uint8)))


def _generators(model: Any) -> Iterator[Tuple[str, Any]]:
    for name, module in model.named_modules():
        generator = getattr(module, "generator", None)
        if callable(getattr(generator, "get_state", None)):
            yield name, generator


def _own_state() -> Dict[str, Any]:
    import oneflow as flow

    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(Tuple[Any, ...], np.random.get_state(legacy=True))
    state: Dict[str, Any] = {
        "python": [version, _encode(np.asarray(words, np.uint32)), gauss],
        "numpy": [name, _encode(keys), int(position), int(has_gauss), float(cached)],
        "oneflow": {"cpu": _encode(flow.get_rng_state().numpy())},
    }
    if flow.cuda.is_available():
        state["oneflow"]["cuda"] = _encode(flow.cuda.get_rng_state().numpy())
    return state


def _set_own_state(state: Dict[str, Any]) -> None:
    import oneflow as flow

    version, words, gauss = state["python"]
    random.setstate((version, tuple(int(word) for word in _decode(words, np.uint32)), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    legacy: Tuple[Any, ...] = (name, _decode(keys, np.uint32), position, has_gauss, cached)
    np.random.set_state(legacy)
    flow.set_rng_state(flow.from_numpy(_decode(state["oneflow"]["cpu"], np.uint8)))
    if flow.cuda.is_available() and "cuda" in state["oneflow"]:
        flow.cuda.set_rng_state(flow.from_numpy(_decode(state["oneflow"]["cuda"], np.uint8)))


def _encode(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _decode(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()
