"""The link between nodes: rank 0 sends the leader of each other node the rows that its ranks need, and no others.

A sending thread for each node, and a receiving one there, move bytes while the models compute; sockets bound what is
under way. Heads are JSON, so that nothing that comes over the network is ever executed; a shared secret keeps strangers
out.
"""

from __future__ import annotations

import hmac
import json
import queue
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from libai_data.errors import PeerError
from libai_data.global_batch.feeds import NodeBatch
from libai_data.loader.arena import Arena
from libai_data.loader.schema import Layout
from libai_data.loader.slots import SlotRing, bytes_of, lay_out
from libai_data.structures import BatchInfo

_LENGTH = struct.Struct("<Q")
_LONGEST_HEAD = 1 << 24
_SECONDS_TO_MEET = 60.0
_SECONDS_BETWEEN_TRIES = 0.05
_SECONDS_UNHEARD = 20


def open_network_link() -> Tuple[socket.socket, int]:
    """Begin to listen for the leaders of the other nodes; returns the socket and its port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("", 0))
    listener.listen(4096)
    return listener, listener.getsockname()[1]


def accept_leaders(listener: socket.socket, nodes: Sequence[int], secret: str) -> Dict[int, socket.socket]:
    """Wait until the leaders of these nodes have connected.

    Args:
        listener: of `open_network_link`; closed afterwards.
        nodes: all but the first.
        secret: known to the ranks of this job alone.

    Raises:
        PeerError: Some did not come in time; they are named.
    """
    links: Dict[int, socket.socket] = {}
    deadline = time.monotonic() + _SECONDS_TO_MEET
    with listener:
        while len(links) < len(nodes):
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                link, _ = listener.accept()
            except socket.timeout as error:
                missing = sorted(set(nodes) - set(links))
                raise PeerError(f"nodes {missing} did not connect to rank 0 within {_SECONDS_TO_MEET:.0f} s") from error
            link.settimeout(_SECONDS_TO_MEET)
            head = _receive_head(link)
            if not hmac.compare_digest(str(head.get("secret")), secret):
                link.close()
                continue
            link.settimeout(None)
            _notice_death(link)
            links[int(head["node"])] = link
    return links


def connect_to_rank0(host: str, port: int, node: int, secret: str) -> socket.socket:
    """Connect a node's leader to rank 0.

    Args:
        host: MASTER_ADDR, as the launcher gave it to all nodes.
        port: where rank 0 listens.
        node: this one.
        secret: as in `accept_leaders`.

    Raises:
        PeerError: Rank 0 cannot be reached.
    """
    deadline = time.monotonic() + _SECONDS_TO_MEET
    while True:
        try:
            link = socket.create_connection((host, port), timeout=_SECONDS_TO_MEET)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"node {node} cannot reach rank 0 at {host}, port {port}: {error}. Data comes over ports that the "
                    "system chooses; allow them between the nodes, or use readers=node"
                ) from error
            time.sleep(_SECONDS_BETWEEN_TRIES)
    link.settimeout(None)
    _notice_death(link)
    _send_head(link, {"secret": secret, "node": node})
    return link


def _notice_death(link: socket.socket) -> None:
    """Let the system find out when the other machine, or the way to it, is gone."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SECONDS_UNHEARD // 2)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SECONDS_UNHEARD // 4)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SECONDS_UNHEARD * 1000)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send_head(link: socket.socket, head: Dict[str, Any]) -> None:
    packed = json.dumps(head).encode()
    link.sendall(_LENGTH.pack(len(packed)) + packed)


def _receive_head(link: socket.socket) -> Dict[str, Any]:
    length = _LENGTH.unpack(_receive_exactly(link, memoryview(bytearray(_LENGTH.size))))[0]
    if length > _LONGEST_HEAD:
        raise PeerError(f"a message of {length} bytes was announced; the other end is no rank of this job")
    head: Dict[str, Any] = json.loads(bytes(_receive_exactly(link, memoryview(bytearray(length)))))
    return head


def _receive_exactly(link: socket.socket, target: memoryview) -> memoryview:
    received = 0
    while received < len(target):
        count = link.recv_into(target[received:])
        if not count:
            raise EOFError("the other end is closed")
        received += count
    return target


class NetworkPublisher:
    """Sends one node's rows of each batch, from a thread of its own.

    Args:
        link: to the node's leader.
        node: named in errors.
        shards: those of its ranks, ascending.
        data_parallel_size: shards of a whole batch.
        ahead: batches that may wait to be sent.
    """

    def __init__(
        self, link: socket.socket, node: int, shards: Sequence[int], data_parallel_size: int, ahead: int
    ) -> None:
        self._link = link
        self._node = node
        self._shards = shards
        self._data_parallel_size = data_parallel_size
        self._generation = 0
        self._failure: Optional[OSError] = None
        self._waiting: queue.Queue[Optional[Tuple[Dict[str, Any], List[memoryview]]]] = queue.Queue(ahead + 1)
        self._thread = threading.Thread(target=self._send_all, name=f"send to node {node}", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Begin a new pass."""
        self._generation += 1

    def publish(self, batch: NodeBatch) -> None:
        """Send a batch, or rather the rows of it that the node needs.

        Raises:
            PeerError: The node is gone.
        """
        fields = []
        buffers: List[memoryview] = []
        for name, array in batch.arrays.items():
            rows = len(array) // self._data_parallel_size
            pieces = [array[shard * rows : (shard + 1) * rows] for shard in self._shards]
            layout = batch.layouts[name]
            shape = [rows * len(pieces), *array.shape[1:]]
            fields.append([name, array.dtype.str, shape, list(layout.sbp_list), layout.placement_idx])
            buffers += [piece.reshape(-1).view(np.uint8).data for piece in pieces if piece.size]
        self._put({"kind": "batch", "info": asdict(batch.info), "fields": fields}, buffers)

    def end(self) -> None:
        """Say that the pass is over."""
        self._put({"kind": "end"}, [])

    def fail(self, error: BaseException) -> None:
        """Say that reading failed, if the node is still there."""
        if self._failure is None:
            self._put({"kind": "error", "message": f"{type(error).__name__}: {error}"}, [])

    def _put(self, head: Dict[str, Any], buffers: List[memoryview]) -> None:
        item = ({**head, "generation": self._generation}, buffers)
        while self._failure is None:
            try:
                self._waiting.put(item, timeout=1.0)
                return
            except queue.Full:
                continue
        raise PeerError(f"node {self._node} is gone: {self._failure}; its output tells why") from self._failure

    def _send_all(self) -> None:
        while True:
            item = self._waiting.get()
            if item is None:
                return
            try:
                _send_head(self._link, item[0])
                for buffer in item[1]:
                    self._link.sendall(buffer)
            except OSError as error:
                self._failure = error
                return

    def close(self) -> None:
        """Send what waits, and hang up."""
        if self._failure is None:
            self._waiting.put(None)
            self._thread.join(timeout=_SECONDS_UNHEARD)
        self._link.close()


class NetworkFeed:
    """Receives a node's rows of each batch from rank 0, in a thread of its own, ahead of the models' need.

    Args:
        link: to rank 0.
        arena: memory that the node's ranks share.
        ahead: batches to receive ahead of the one asked for.
    """

    def __init__(self, link: socket.socket, arena: Arena, ahead: int) -> None:
        self._link = link
        self._ring = SlotRing(arena, planned=ahead + 4)
        self._generation = 0
        self._received: queue.Queue[Tuple[str, int, Any]] = queue.Queue(ahead)
        self._closing = False
        self._thread = threading.Thread(target=self._receive_all, name="receive from rank 0", daemon=True)
        self._thread.start()

    def begin(self, position: int) -> None:
        """Wait for batches of a new pass; those of an earlier one are dropped."""
        self._generation += 1

    def next(self) -> Optional[NodeBatch]:
        """Wait for the next batch; None at the end of the pass.

        Raises:
            PeerError: Rank 0 failed or is gone.
        """
        while True:
            found = self._meant(self._received.get())
            if found is not None:
                return found[0]

    def next_if_ready(self) -> Optional[NodeBatch]:
        """The next batch if it has arrived by now."""
        with self._received.mutex:
            waits = bool(self._received.queue) and self._received.queue[0][:2] == ("batch", self._generation)
        return self.next() if waits else None

    def _meant(self, message: Tuple[str, int, Any]) -> Optional[Tuple[Optional[NodeBatch]]]:
        """What a message says to the present pass, if it says anything to it."""
        kind, generation, content = message
        if kind == "gone":
            raise PeerError(f"rank 0, which reads for all, is gone: {content}; its output tells why")
        if generation != self._generation:
            return None
        if kind == "error":
            raise PeerError(f"rank 0, which reads for all, failed: {content}")
        return (content,)

    def _receive_all(self) -> None:
        try:
            while True:
                head = _receive_head(self._link)
                content = self._receive_batch(head) if head["kind"] == "batch" else head.get("message")
                self._received.put((head["kind"], head["generation"], content))
        except (OSError, EOFError, ValueError, PeerError) as error:
            if not self._closing:
                self._received.put(("gone", 0, error))

    def _receive_batch(self, head: Dict[str, Any]) -> NodeBatch:
        fields = head["fields"]
        specs = lay_out((name, np.dtype(dtype), shape) for name, dtype, shape, _, _ in fields)
        slot = self._ring.acquire(bytes_of(specs))
        arrays = self._ring.hand_out(slot, specs)
        for array in arrays.values():
            if array.size:
                _receive_exactly(self._link, array.reshape(-1).view(np.uint8).data)
        layouts = {name: Layout(tuple(sbp_list), index) for name, _, _, sbp_list, index in fields}
        return NodeBatch(BatchInfo(**head["info"]), None, arrays, layouts, (slot.offset, slot.size), specs)

    def close(self) -> None:
        """Hang up."""
        self._closing = True
        with suppress(OSError):
            # Closing alone would not wake the thread that receives.
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()
