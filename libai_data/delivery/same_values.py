"""Compares values between all ranks, as text that is the same in every process, and names the differences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from libai_data.config.naming import dotted_name
from libai_data.delivery.gather import digest_of
from libai_data.errors import ConfigError, by_rank
from libai_data.mesh.current import get_mesh
from libai_data.mesh.peers.liveness import begin_collective

_NAMED = 5
_LONGEST_VALUE = 120
_ABSENT = "absent"
_OF_THE_PROCESS = (
    *("num_workers", "worker_type", "threads_per_worker", "worker_init_fn", "start_method"),
    *("prefetch", "timeout", "quarantine_file"),
)
"""Arguments of loaders that change no batch."""


def check_same_arguments(readers: str, **given: Any) -> None:
    """Compare a loader's arguments between all ranks: only those of the ranks that read have an effect. Collective."""
    if get_mesh().world_size == 1:
        return
    own: dict[str, str] = {}
    for name, value in given.items():
        if name in _OF_THE_PROCESS:
            continue
        if isinstance(value, DictConfig):
            value = OmegaConf.to_container(value, resolve=False)
        elif isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, list) and len(value) > _NAMED:
            texts = json.dumps([_text_of(each) for each in value])
            value = f"{len(value)} value(s), digest {digest_of(texts.encode()):x}"
        own.update(flat_text(name, value))
    told = begin_collective("a comparison of a loader's arguments", json.dumps(own))
    found = differences({rank: json.loads(words) for rank, words in sorted(told.items())})
    if found:
        raise ConfigError(
            f"the ranks make the same loader with different arguments: {'; '.join(found)}. With readers={readers}, the "
            "loader uses the arguments of the ranks that read; give all ranks the same arguments"
        )


def differences(values: Mapping[int, Mapping[str, str]], most: int = _NAMED) -> list[str]:
    """The values that differ between the ranks, in words, with the ranks that have them; at most `most` values."""
    names = sorted({name for each in values.values() for name in each})
    differing = [name for name in names if len({each.get(name, _ABSENT) for each in values.values()}) > 1]
    found = [
        f"{name} is {by_rank({rank: each.get(name, _ABSENT) for rank, each in values.items()})}"
        for name in differing[:most]
    ]
    return found + ([f"and {len(differing) - most} more"] if len(differing) > most else [])


def flat_text(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """The values within a value, with their dotted keys, as text."""
    if isinstance(value, Mapping) and value:
        for name, each in value.items():
            yield from flat_text(f"{key}.{name}" if key else str(name), each)
    elif isinstance(value, (list, tuple)) and value:
        for place, each in enumerate(value):
            yield from flat_text(f"{key}.{place}", each)
    else:
        yield key, _text_of(value)


def _text_of(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str, bytes, Path, Mapping, list, tuple)):
        text = repr(value)
    else:
        # Not its repr, which may contain a memory address.
        text = dotted_name(value) or f"a {type(value).__qualname__}"
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[:_LONGEST_VALUE]}... ({digest_of(text.encode()):x})"
