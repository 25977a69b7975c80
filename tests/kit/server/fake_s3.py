"""A server on 127.0.0.1 that answers S3 requests as a test configures it: by key id, and with requested errors."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_KEY_ID = re.compile(r"Credential=([^/]+)/")


class FakeS3:
    """One bucket. `accepted` are the known key ids; empty: all of them."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.accepted: set[str] = set()
        self.refusal = (403, "ExpiredToken")
        self.conflicts = 0  # The number of conditional PUTs to be answered with 409.
        self.asked: list[tuple[str, str]] = []  # Verb and key id of each request.
        self.endpoint = ""

    def url(self, prefix: str = "prefix") -> str:
        return f"s3://bucket/{prefix}?endpoint={self.endpoint}&region=us-east-1"

    def refused(self) -> int:
        return sum(1 for _, key_id in self.asked if self.accepted and key_id not in self.accepted)


@contextmanager
def fake_s3() -> Iterator[FakeS3]:
    state = FakeS3()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Do nothing: tests inspect `asked`."""

        def _answer(self, status: int, body: bytes = b"", code: str = "", span: str = "") -> None:
            if code:
                body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if span:
                self.send_header("Content-Range", span)
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Fri, 27 Nov 2026 20:00:00 GMT")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _serve(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            signed = _KEY_ID.search(self.headers.get("Authorization") or "")
            key_id, path = signed[1] if signed else "", self.path.partition("?")[0]
            state.asked.append((self.command, key_id))
            if state.accepted and key_id not in state.accepted:
                return self._answer(state.refusal[0], code=state.refusal[1])
            if self.command == "PUT":
                return self._put(path, data)
            if self.command == "POST":  # For several objects.
                names = re.findall(r"<Key>([^<]+)</Key>", data.decode())
                for name in names:
                    state.objects.pop(f"/bucket/{name}", None)
                deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
                return self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
            if "list-type=2" in self.path:
                return self._answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
            if (found := state.objects.get(path)) is None:
                return self._answer(404, code="NoSuchKey")
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
            if span is None:
                return self._answer(200, found)
            first, last = int(span[1]), min(int(span[2]), len(found) - 1)
            return self._answer(206, found[first : last + 1], span=f"bytes {first}-{last}/{len(found)}")

        def _put(self, path: str, data: bytes) -> None:
            if self.headers.get("If-None-Match"):
                if state.conflicts:
                    state.conflicts -= 1
                    return self._answer(409, code="ConditionalRequestConflict")
                if path in state.objects:
                    return self._answer(412, code="PreconditionFailed")
            state.objects[path] = data
            return self._answer(200)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815 - names of the base class

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
