"""A few integers of every rank, to every rank: what checks between ranks are made of."""

from __future__ import annotations

import hashlib
import zlib

import numpy as np

from libai_data.mesh.current import get_mesh
from libai_data.mesh.peers.liveness import begin_collective


def gather_words(words: np.ndarray) -> np.ndarray:
    """Exchange some integers between all ranks, in one collective; each rank must call it, on the main thread.

    The words are int64 [n], with the same n on all ranks; the result is int64 [world size, n].
    """
    world_size = get_mesh().world_size
    if world_size == 1:
        return words[None]
    # Not by OneFlow, whose queue may still hold other work than that of the other ranks.
    own = np.ascontiguousarray(words, dtype=np.int64).tobytes().hex()
    told = begin_collective(f"a comparison of {words.size} number(s)", own)
    table = bytes.fromhex("".join(told[rank] for rank in range(world_size)))
    return np.frombuffer(table, dtype=np.int64).reshape(world_size, -1)


def digest_of(data: bytes | memoryview) -> int:
    """63 bits that differ where the bytes differ."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def checksum_of(array: np.ndarray) -> int:
    """32 bits that, but for one chance in 2^32, differ where the bytes differ; several times as fast as a digest."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
