"""HighwayHash of many short byte strings at once, with the key of Riegeli files.

Source: J. Alakuijala, B. Cox, J. Wassenberg, "Fast keyed hash/pseudo-random function using SIMD multiply and permute"
(arXiv:1612.06257), and the reference code at github.com/google/highwayhash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_PACKET = 32
_FINAL_ROUNDS = 4
_KEY = np.frombuffer(b"Riegeli/records\nRiegeli/records\n", "<u8")
_MUL0 = np.array([0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3], np.uint64)
_MUL1 = np.array([0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377], np.uint64)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
# Which byte of a pair of lanes comes where when they are merged; the other pair likewise.
_ZIPPER = np.array([3, 12, 2, 5, 14, 1, 15, 0, 11, 4, 10, 13, 9, 6, 8, 7])
_ZIPPER = np.concatenate([_ZIPPER, _ZIPPER + 16])


def _ends() -> np.ndarray:
    """By the length of the last, incomplete packet: which of its bytes stands where in the packet that is hashed.

    Place 32 stands for a zero.
    """
    table = np.full((_PACKET, _PACKET), _PACKET)
    for length in range(1, _PACKET):
        whole, rest = length & ~3, length & 3
        table[length, :whole] = np.arange(whole)
        if length & 16:
            table[length, 28:] = np.arange(4) + length - 4
        elif rest:
            table[length, 16:19] = [whole, whole + (rest >> 1), whole + rest - 1]
    return table


_ENDS = _ends()


class _State(NamedTuple):
    """Four lanes of each hash, uint64 [n, 4] each, and what a round needs besides."""

    v0: np.ndarray
    v1: np.ndarray
    mul0: np.ndarray
    mul1: np.ndarray
    half: np.ndarray
    low: np.ndarray
    zipper: np.ndarray

    @staticmethod
    def start(count: int) -> _State:
        """The state of `count` hashes before the first packet."""
        turned = _KEY << _HALF | _KEY >> _HALF
        lanes = [_MUL0 ^ _KEY, _MUL1 ^ turned, _MUL0, _MUL1]
        # As arrays, since numpy takes longer over scalars; the merge of lanes as one take over all bytes.
        constants = [np.full(4, number) for number in (_HALF, _LOW)]
        zipper = np.arange(count)[:, None] * _PACKET + _ZIPPER
        return _State(*[np.repeat(each[None], count, 0) for each in (*lanes, *constants)] + [zipper])

    def first(self, count: int) -> _State:
        """The state of the first `count` hashes, in the same memory."""
        return _State(*(each[:count] for each in self))

    def update(self, packet: np.ndarray) -> None:
        """Take in a packet of each, uint64 [n, 4]."""
        v0, v1, mul0, mul1, half, low, zipper = self
        v1 += mul0
        v1 += packet
        mul0 ^= (v1 & low) * (v0 >> half)
        v0 += mul1
        mul1 ^= (v0 & low) * (v1 >> half)
        v0 += v1.view(np.uint8).take(zipper).view(np.uint64)
        v1 += v0.view(np.uint8).take(zipper).view(np.uint64)


def hashes(strings: Sequence[bytes]) -> np.ndarray:
    """HighwayHash-64 of each string, uint64 [n].

    The work is that of the longest string, packet after packet: it is meant for strings of some hundred bytes.
    """
    lengths = np.fromiter(map(len, strings), np.int64, len(strings))
    if not len(lengths):
        return np.zeros(0, np.uint64)
    # The longest first, so that those which have a further packet are always the first ones.
    order = np.argsort(-lengths, kind="stable")
    lengths = lengths[order]
    packets = _packets([strings[place] for place in order.tolist()], int(lengths[0]))
    state = _State.start(len(lengths))
    whole = lengths // _PACKET
    numbers = np.arange(int(whole[0]))
    for number, count in zip(numbers.tolist(), (len(whole) - np.searchsorted(whole[::-1], numbers, "right")).tolist()):
        state.first(count).update(packets[number, :count].view("<u8"))
    _add_ends(state, packets, lengths)
    for _ in range(_FINAL_ROUNDS):
        state.update((state.v0 << state.half | state.v0 >> state.half)[:, [2, 3, 0, 1]])
    found = np.empty(len(lengths), np.uint64)
    found[order] = state.v0[:, 0] + state.v1[:, 0] + state.mul0[:, 0] + state.mul1[:, 0]
    return found


def _packets(strings: Sequence[bytes], longest: int) -> np.ndarray:
    """The strings, padded with zeros to whole packets, and one packet more: uint8 [packets, n, 32]."""
    count = longest // _PACKET + 1
    padded = b"".join([string.ljust(count * _PACKET, b"\0") for string in strings])
    apart = np.frombuffer(padded, np.uint64).reshape(len(strings), count, _PACKET // 8)
    return np.ascontiguousarray(apart.transpose(1, 0, 2)).view(np.uint8)


def _add_ends(state: _State, packets: np.ndarray, lengths: np.ndarray) -> None:
    """Hash what lies behind the last whole packet of each string, where there is something."""
    rows = np.flatnonzero(lengths % _PACKET)
    if not len(rows):
        return
    part = _State(*[each[rows] for each in state[:-1]] + [state.zipper[: len(rows)]])
    size = lengths[rows] % _PACKET
    last = np.zeros((len(rows), _PACKET + 1), np.uint8)
    last[:, :_PACKET] = packets[lengths[rows] // _PACKET, rows]
    bits = size.astype(np.uint64)[:, None]
    np.add(part.v0, (bits << _HALF) + bits, out=part.v0)
    halves = part.v1.view(np.uint32)
    turn = size.astype(np.uint32)[:, None]
    halves[...] = halves << turn | halves >> (np.uint32(32) - turn)
    part.update(np.take_along_axis(last, _ENDS[size], axis=1).view("<u8"))
    for whole, lanes in zip(state[:4], part):
        whole[rows] = lanes
