"""A link between two nodes that can be slowed down, also by a kernel without netem: a relay between their cards.

It runs in a namespace of its own, and hands every frame on after a while, as it is, with what the kernel notes beside
it of checksums and segments that are still to be made (a virtio_net header).

    python slow_link.py FILE     the seconds of delay, read from FILE every now and then
"""

from __future__ import annotations

import heapq
import itertools
import select
import socket
import sys
import time
from pathlib import Path

CARDS = ("side0", "side1")
SECONDS_TO_READ_THE_DELAY = 0.05
_EVERY_FRAME = 3
_SOL_PACKET, _PACKET_IGNORE_OUTGOING, _PACKET_VNET_HDR = 263, 23, 15
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_FRAME_BYTES = 1 << 17


def relay(delay_file: Path) -> None:
    """Hand frames on between the two cards, for ever."""
    sides = [_open(card) for card in CARDS]
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    numbers = itertools.count()
    delay, look_at = 0.0, 0.0
    while True:
        now = time.monotonic()
        if now > look_at:
            delay, look_at = float(delay_file.read_text() or 0), now + SECONDS_TO_READ_THE_DELAY
        while waiting and waiting[0][0] <= now:
            _, _, side, frame = heapq.heappop(waiting)
            try:
                side.send(frame)
            except OSError:  # As a network does that is too busy, it loses the frame.
                continue
        timeout = min(waiting[0][0] - now, 0.05) if waiting else 0.05
        for ready in select.select(sides, [], [], max(timeout, 0))[0]:
            other = sides[1 - sides.index(ready)]
            heapq.heappush(waiting, (time.monotonic() + delay, next(numbers), other, ready.recv(_FRAME_BYTES)))


def _open(card: str) -> socket.socket:
    side = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_FRAME))
    side.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    side.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    side.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 25)
    side.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 1 << 25)
    side.bind((card, 0))
    return side


if __name__ == "__main__":
    relay(Path(sys.argv[1]))
