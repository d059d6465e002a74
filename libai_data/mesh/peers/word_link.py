"""Words between two ranks, whatever connects them."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Union

from libai_data.errors import PeerError
from libai_data.mesh.peers.channel import Channel
from libai_data.mesh.peers.network_link import receive_head, send_head

Connection = Union[Channel, socket.socket]

_sending = threading.Lock()


def send_word(connection: Connection, word: str) -> None:
    """Send a word, unless the other end is gone."""
    with suppress(OSError), _sending:
        if isinstance(connection, Channel):
            connection.send(word)
        else:
            send_head(connection, {"word": word})


def receive_word(connection: Connection) -> str:
    """What the other end says; "" if it is gone."""
    try:
        return str(connection.receive() if isinstance(connection, Channel) else receive_head(connection)["word"])
    except (OSError, EOFError, ValueError, LookupError, PeerError):
        return ""
