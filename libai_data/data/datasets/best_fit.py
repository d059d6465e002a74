"""Packs pieces into samples of one length by best fit, longest pieces first, within windows of pieces.

Source: D. S. Johnson et al., "Worst-case performance bounds for simple one-dimensional packing algorithms" (1974).
"""

from __future__ import annotations

import numpy as np

# Limits of the pieces of a window, and about how many samples it makes; only its last samples stay partly empty.
_LEAST, _MOST, _SAMPLES = 1 << 10, 1 << 16, 128
_WINDOWS_AT_ONCE = 256


def best_fit(lengths: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose the pieces of each sample: a piece is put into the sample of its window in which it leaves the least room,
    or else into a new sample. Lengths are int64 [pieces], from 1 to `room`, the length of a sample.

    Returns:
        int64 [pieces], the pieces in the order of the samples; and int64 [samples + 1], where samples begin in it.
    """
    count = len(lengths)
    mean = max(1.0, float(lengths.mean())) if count else 1.0
    window = min(max(int(_SAMPLES * room / mean), _LEAST), _MOST)
    samples = np.empty(count, np.int64)
    before = 0
    for first in range(0, count, window * _WINDOWS_AT_ONCE):
        some = lengths[first : first + window * _WINDOWS_AT_ONCE]
        rows = np.zeros((-(-len(some) // window), window), np.int32)
        rows.ravel()[: len(some)] = some
        numbers = _samples_of_windows(rows, room)
        used = numbers.max(axis=1) + 1
        numbers += (before + np.cumsum(used) - used)[:, None]
        samples[first : first + len(some)] = numbers.ravel()[: len(some)]
        before += int(used.sum())
    order = np.argsort(samples, kind="stable")
    return order, np.searchsorted(samples[order], np.arange(before + 1))


def best_fit_in_each(lengths: np.ndarray, room: int) -> list[list[np.ndarray]]:
    """For each window its samples, each as the places of its pieces in the window, int64. Lengths are int64 [windows,
    pieces], from 1 to `room`, the length of a sample; 0 if there is no piece."""
    pieces_first = np.argsort(lengths == 0, axis=1, kind="stable")
    pieces = np.take_along_axis(lengths, pieces_first, axis=1).astype(np.int32)
    numbers = np.where(pieces, _samples_of_windows(pieces, room), lengths.shape[1])
    orders = np.take_along_axis(pieces_first, np.argsort(numbers, axis=1, kind="stable"), axis=1)
    found = []
    for order, own in zip(orders, numbers):
        ends = np.cumsum(np.bincount(own[own < len(own)])).tolist()
        found.append([order[begin:end] for begin, end in zip([0, *ends], ends)])
    return found


def _samples_of_windows(lengths: np.ndarray, room: int) -> np.ndarray:
    """The number of each piece's sample, int64 [windows, pieces], from 0 in each window; packs all windows at once.

    `lengths` are int32 [windows, pieces], 0 after the last piece of a window.
    """
    windows, count = lengths.shape
    every = np.arange(windows)
    longest_first = np.argsort(-lengths, axis=1, kind="stable")
    pieces = np.ascontiguousarray(np.take_along_axis(lengths, longest_first, axis=1).T)
    rooms = np.full((windows, count + 1), room, np.int32)
    chosen = np.zeros((count, windows), np.int64)
    opened = 0
    for own, samples in zip(pieces, chosen):
        left = rooms[:, : opened + 1] - own[:, None]
        # Read as unsigned, a negative rest (too little room) is a large number, so argmin does not choose it.
        left.view(np.uint32).argmin(axis=1, out=samples)
        rooms[every, samples] = left[every, samples]
        opened = max(opened, int(samples.max()) + 1)
    found = np.empty_like(longest_first)
    np.put_along_axis(found, longest_first, chosen.T, axis=1)
    # Number the samples by their first pieces, so that the samples are in the order of the pieces.
    firsts = np.full((windows, opened), count)
    np.minimum.at(firsts, (every[:, None], found), np.arange(count)[None, :])
    numbers = np.argsort(np.argsort(firsts, axis=1, kind="stable"), axis=1)
    return np.take_along_axis(numbers, found, axis=1)
