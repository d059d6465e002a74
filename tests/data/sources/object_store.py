"""A real S3 server on loopback (moto's), behind a proxy that counts requests and breaks some of them."""

from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Callable
from urllib.parse import quote

FAIL, BUSY, CUT, STALL = "answers 500", "answers 503", "closes after half of the body", "answers half and waits"
SILENT, FLIP = "does not answer", "changes a byte"
BUCKET = "bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class ObjectStore:
    """The server, and what tests do to it.

    Attributes:
        url: of the proxy.
        faults: what happens to the next GETs of objects, one after the other.
        gets: paths of the objects that were asked for by GET.
        tag: what objects have for an ETag instead of their own.
        before_get: called before an object is passed on.
        holds: what a test says that the bucket holds; None after each change.
        sent: set when half of a body has been sent and STALL waits.
        go_on: a stalled body goes on, and a silent request ends, when it is set.
    """

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        self._moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._moto.start()
        host, port = self._moto.get_host_and_port()
        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self, f"{host}:{port}"))
        self._proxy.daemon_threads = True
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._proxy.server_address[1]}"
        self._direct = f"{host}:{port}"
        self.holds: object = None
        self.end_faults()
        self.empty()

    def empty(self) -> None:
        """An empty bucket."""
        self._ask("POST", "/moto-api/reset")
        self._ask("PUT", f"/{BUCKET}")

    def end_faults(self) -> None:
        """No faults, and nothing noted."""
        self.faults: list[str] = []
        self.gets: list[str] = []
        self.tag = ""
        self.before_get: Callable[[str], object] | None = None
        self.sent, self.go_on = threading.Event(), threading.Event()

    def put(self, name: str, data: bytes) -> str:
        """Write an object; returns its address."""
        self._ask("PUT", f"/{BUCKET}/{quote(name)}", data)
        return f"s3://{BUCKET}/{name}"

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._ask("DELETE", f"/{BUCKET}/{quote(name)}")

    def environment(self) -> dict[str, str]:
        """What a process needs to find this store."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.url}

    def close(self) -> None:
        """Stop the servers."""
        self.go_on.set()
        self._proxy.shutdown()
        self._proxy.server_close()
        self._moto.stop()

    def _ask(self, method: str, path: str, body: bytes = b"") -> None:
        self.holds = None
        connection = http.client.HTTPConnection(self._direct)
        # Without one, moto refuses to write over what is there.
        credential = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"
        connection.request(method, path, body, {"Authorization": f"{credential}, SignedHeaders=host, Signature=none"})
        status = connection.getresponse().status
        connection.close()
        if status not in (200, 204):
            raise RuntimeError(f"{method} {path} was answered with {status}")


def _handler_of(store: ObjectStore, target: str) -> Any:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            is_object = self.command == "GET" and self.path.split("?")[0].count("/") > 1
            fault = ""
            if self.command not in ("GET", "HEAD"):
                store.holds = None
            if is_object:
                store.gets.append(self.path.split("?")[0])
                fault = store.faults.pop(0) if store.faults else ""
                if store.before_get is not None:
                    store.before_get(self.path)
            if fault == SILENT:
                store.go_on.wait()
                self.close_connection = True
                return
            if fault in (FAIL, BUSY):
                self.send_error(500 if fault == FAIL else 503)
                return
            connection = http.client.HTTPConnection(target)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            self._send(answer, content, fault)

        def _send(self, answer: http.client.HTTPResponse, content: bytes, fault: str) -> None:
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                    self.send_header(name, store.tag if store.tag and name.lower() == "etag" else value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            if fault == FLIP:
                content = bytes([content[0] ^ 1]) + content[1:]
            half = len(content) // 2 if fault in (CUT, STALL) else len(content)
            try:
                self.wfile.write(content[:half])
            except OSError:
                if fault:  # Who asked has ended meanwhile: the fault is for the next request.
                    store.faults.insert(0, fault)
                raise
            if fault == STALL:
                self.wfile.flush()
                store.sent.set()
                store.go_on.wait()
                self.wfile.write(content[half:])
            self.close_connection = fault == CUT

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
