"""A schema registry in this process: the read requests of Confluent's registry, on a free loopback port."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit


class SchemaRegistry:
    """`put` registers a schema; `asked` counts requests by path; `failing` has the statuses of the next answers."""

    def __init__(self, credentials: str | None = None) -> None:
        self._credentials = credentials
        self._by_id: dict[int, dict[str, Any]] = {}
        self._by_version: dict[tuple[str, int], int] = {}
        self.asked: Counter[str] = Counter()
        self.failing: list[int] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def put(
        self,
        number: int,
        schema: str,
        subject: str,
        version: int = 1,
        *,
        kind: str = "AVRO",
        references: Sequence[Mapping[str, object]] = (),
    ) -> None:
        """Register a schema. Like Confluent's, Avro has no `schemaType`, and empty references are omitted."""
        told: dict[str, Any] = {"schema": schema}
        told |= {} if kind == "AVRO" else {"schemaType": kind}
        told |= {"references": list(references)} if references else {}
        self._by_id[number] = told
        self._by_version[subject, version] = number

    def _answer(self, target: str, authorization: str | None) -> tuple[int, dict[str, Any]]:
        place = urlsplit(target)
        self.asked[place.path] += 1
        if self.failing:
            status = self.failing.pop(0)
            return status, {"error_code": status, "message": "not now"}
        if self._credentials is not None:
            wanted = "Basic " + base64.b64encode(self._credentials.encode()).decode()
            if authorization != wanted:
                return 401, {"error_code": 401, "message": "Unauthorized"}
        if by_id := re.fullmatch(r"/schemas/ids/(\d+)", place.path):
            found = self._by_id.get(int(by_id[1]))
            return (404, {"error_code": 40403, "message": "Schema not found"}) if found is None else (200, found)
        if by_version := re.fullmatch(r"/subjects/([^/]+)/versions/(\d+)", place.path):
            subject, version = unquote(by_version[1]), int(by_version[2])
            number = self._by_version.get((subject, version))
            if number is None:
                return 404, {"error_code": 40402, "message": "Version not found."}
            return 200, {"subject": subject, "version": version, "id": number, **self._by_id[number]}
        return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, found = registry._answer(self.path, self.headers.get("Authorization"))
                data = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Do nothing: the log is not used."""

        return Handler
