"""Batches between nodes: rank 0 sends the leader of each other node the rows of the fields that its ranks need.

One thread of rank 0 for each node sends, and one thread on each node receives, while the models compute. The sockets
limit how much is in transit.
"""

from __future__ import annotations

import pickle
import queue
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np

from libai_data.delivery.feeds import MOST_UNTAKEN, Feed, NodeBatch, in_one_line
from libai_data.delivery.read_plan import ReadPlan
from libai_data.errors import PeerError
from libai_data.loader.arena import Arena
from libai_data.loader.schema import Layout
from libai_data.loader.slots import SlotList, bytes_of, lay_out
from libai_data.mesh.peers.links import SECONDS_UNHEARD, receive_exactly, receive_head, send_head
from libai_data.mesh.peers.liveness import waiting_for_rank
from libai_data.structures import BatchInfo

_SECONDS_TO_SEND_A_FAILURE = 2.0
_SECONDS_BETWEEN_LOOKS = 0.05

_KEPT = MOST_UNTAKEN + 5
"""Batches in addition to those received ahead: one in transit, and those that the node's ranks wait for or use."""

Message = tuple[dict[str, Any], list[memoryview]]


class NetworkPublisher:
    """Sends a node its rows of each batch, in a thread of its own.

    Args:
        ahead: number of batches that may wait to be sent.
    """

    def __init__(self, link: socket.socket, node: int, plan: ReadPlan, ahead: int) -> None:
        self._link = link
        self._node = node
        self._plan, self._shards = plan, plan.shards_of_node(node)
        self._ahead = ahead
        self._generation = 0
        # Protects what the two threads share, and notifies them of changes.
        self._changed = threading.Condition()
        self._waiting: deque[Message] = deque()
        self._sending = False
        self._closing = False
        self._has_left = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._send_all, name=f"send to node {node}", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Begin a new pass."""
        self._generation += 1

    def publish(self, batch: NodeBatch) -> None:
        """Queue the rows of a batch that the node needs, once there is room; raises PeerError if the node died."""
        fields: list[Any] = []
        buffers: list[memoryview] = []
        for name, array in batch.arrays.items():
            rows = len(array) // self._plan.mesh.data_parallel_size
            pieces = [array[shard * rows : (shard + 1) * rows] for shard in self._shards]
            layout = batch.layouts[name]
            shape = [rows * len(pieces), *array.shape[1:]]
            is_sent = self._plan.is_sent_to(self._node, layout.placement_idx)
            fields.append([name, array.dtype.str, shape, list(layout.sbp_list), layout.placement_idx, is_sent])
            if is_sent:
                buffers += [
                    np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data for piece in pieces if piece.size
                ]
        head = {"kind": "batch", "info": batch.info._asdict(), "fields": fields}
        if batch.skeleton is not None:
            head["skeleton"] = pickle.dumps(batch.skeleton).hex()
        self._put(head, buffers)

    def end(self) -> None:
        """Tell the node that the pass is over."""
        self._put({"kind": "end"}, [])

    def fail(self, error: BaseException) -> None:
        """Tell the node that reading failed; waits until this is sent, 2 seconds at most, as this process may end."""
        head = {"kind": "error", "message": in_one_line(error), "generation": self._generation}
        with self._changed:
            if self._failure is None and not self._has_left:
                self._waiting.append((head, []))
                self._changed.notify_all()
                self._changed.wait_for(self._all_is_sent, _SECONDS_TO_SEND_A_FAILURE)

    def _put(self, head: dict[str, Any], buffers: list[memoryview]) -> None:
        with self._changed:
            with waiting_for_rank(f"node {self._node}, which does not ask for a batch"):
                self._changed.wait_for(self._has_room)
            if self._has_left or self._closing:
                return
            if self._failure is not None:
                raise PeerError(f"node {self._node} is gone: {self._failure}; see its output") from self._failure
            self._waiting.append(({**head, "generation": self._generation}, buffers))
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return len(self._waiting) < self._ahead or self._failure is not None or self._has_left or self._closing

    def _all_is_sent(self) -> bool:
        return not (self._waiting or self._sending) or self._failure is not None or self._has_left

    def _has_work(self) -> bool:
        return bool(self._waiting) or self._closing

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._sending = False
                self._changed.notify_all()
                self._changed.wait_for(self._has_work)
                if not self._waiting:
                    return
                message = self._waiting.popleft()
                self._sending = True
                self._changed.notify_all()
            try:
                self._send(*message)
            except Exception as error:  # Whatever it is, the next `publish` must raise it.
                with self._changed:
                    self._has_left, self._failure = self._has_sent_leave(), error
                    self._waiting.clear()
                    self._changed.notify_all()
                return
            del message  # The message keeps the batch's memory in use.

    def _send(self, head: dict[str, Any], buffers: list[memoryview]) -> None:
        send_head(self._link, head)
        for buffer in buffers:
            self._link.sendall(buffer)

    def _has_sent_leave(self) -> bool:
        """Whether the node sent "leave" before it closed the connection: it needs no more batches."""
        self._link.settimeout(0)
        try:
            return receive_head(self._link).get("kind") == "leave"
        except (OSError, EOFError, ValueError, PeerError):
            return False

    def close(self, untaken: int = 0) -> None:
        """Send what the node still needs, without the last `untaken` batches, and close the connection."""
        with self._changed:
            for _ in range(min(untaken, len(self._waiting))):
                self._waiting.pop()
            self._closing = True
            self._changed.notify_all()
        # The garbage collector may call this in the thread itself, which then ends by itself.
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=SECONDS_UNHEARD)
            self._link.close()


class NetworkFeed(Feed):
    """Receives a node's rows of each batch from rank 0, in a thread of its own, before the models need them."""

    def __init__(self, link: socket.socket, arena: Arena, ahead: int) -> None:
        self._link = link
        self._slot_list = SlotList(arena, planned=ahead + _KEPT)
        self._generation = 0
        self._received: queue.Queue[tuple[str, int, Any]] = queue.Queue(ahead)
        self._gone: PeerError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._receive_all, name="receive from rank 0", daemon=True)
        self._thread.start()

    def begin(self, position: int) -> None:
        """Begin a new pass; batches of an earlier pass that still come are dropped."""
        self._generation += 1

    def next(self) -> NodeBatch | None:
        """Wait for the next batch; None at the end of the pass. Raises PeerError if rank 0 failed or is gone."""
        while True:
            if self._gone is not None:
                raise self._gone
            with waiting_for_rank("a batch of rank 0"):
                found = self._content_for_pass(self._received.get())
            if found is not None:
                return found[0]

    def next_if_ready(self) -> NodeBatch | None:
        with self._received.mutex:
            waits = bool(self._received.queue) and self._received.queue[0][:2] == ("batch", self._generation)
        return self.next() if waits else None

    def _content_for_pass(self, message: tuple[str, int, Any]) -> tuple[NodeBatch | None] | None:
        """A tuple of the batch of a message, or of None at the end of the pass; None if it is of an earlier pass."""
        kind, generation, content = message
        if kind == "gone":
            # Nothing more will come, so that each further call raises the error again.
            self._gone = PeerError(f"rank 0, which reads for all, sends no more batches: {content}; see its output")
            raise self._gone from content
        if generation != self._generation:
            return None
        if kind == "error":
            raise PeerError(f"rank 0, which reads for all, failed: {content}")
        return (content,)

    def _receive_all(self) -> None:
        try:
            # What rank 0 sent before it closed the connection is still received.
            while not self._closing:
                head = receive_head(self._link)
                content = self._receive_batch(head) if head["kind"] == "batch" else head.get("message")
                self._received.put((head["kind"], head["generation"], content))
                del content
        except Exception as error:  # Whatever it is, the thread that waits for a batch must raise it.
            if not self._closing:
                self._received.put(("gone", 0, error))

    def _receive_batch(self, head: dict[str, Any]) -> NodeBatch:
        fields = head["fields"]
        specs = lay_out((name, np.dtype(dtype), shape) for name, dtype, shape, *_ in fields)
        slot = self._slot_list.acquire(bytes_of(specs))
        arrays = self._slot_list.hand_out(slot, specs)
        for name, *_, is_sent in fields:
            array = arrays[name]
            if not is_sent:
                array.fill(0)
            elif array.size:
                receive_exactly(self._link, array.reshape(-1).view(np.uint8).data)
        layouts = {name: Layout(tuple(sbp_list), index) for name, _, _, sbp_list, index, _ in fields}
        skeleton = pickle.loads(bytes.fromhex(head["skeleton"])) if "skeleton" in head else None
        info = BatchInfo(**head["info"])
        if isinstance(info.next_start, list):  # starts of lanes; JSON has no tuples
            info = info._replace(next_start=tuple(info.next_start))
        return NodeBatch(info, None, arrays, layouts, skeleton, (slot.offset, slot.size), specs)

    def close(self) -> None:
        self._closing = True
        with suppress(OSError):
            self._link.settimeout(_SECONDS_TO_SEND_A_FAILURE)
            send_head(self._link, {"kind": "leave"})
        with suppress(OSError):
            # Closing alone would not wake the thread that receives.
            self._link.shutdown(socket.SHUT_RDWR)
        while self._thread.is_alive() and self._thread is not threading.current_thread():
            # The thread may wait for room for a batch that nobody needs.
            with suppress(queue.Empty):
                self._received.get(timeout=_SECONDS_BETWEEN_LOOKS)
        with self._received.mutex:
            # Another thread may wait for a batch.
            self._received.queue.appendleft(("gone", 0, EOFError("this rank has closed the connection")))
            self._received.not_empty.notify_all()
        self._link.close()
