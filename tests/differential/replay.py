"""Play scenarios against a name server and a broker, and keep their answers."""

from __future__ import annotations

import json
import re
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from neve.record.ids import parse_offset_msg_id
from neve.remoting.command import FLAG_ONEWAY, RemotingCommand, decode_command, encode_command
from neve.remoting.frame import FrameDecoder
from tests.differential.answers import CLOSED, SILENT, Answer, Normaliser, at_path, names_of, read_answer
from tests.differential.steps import BROKER, NAMESRV, Body, Scenario, Step

_PLACEHOLDER = re.compile(r"\$\{(\w+)(:place)?\}")
_CONNECT_S = 10.0
_UNTIL_S = 10.0
#: A body of this size contains no ids, only bulk.
_LARGE = 65_536


class Line:
    """One connection. Requests of the server on it are ignored, as by a client that does not know them."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), _CONNECT_S)
        name = self.socket.getsockname()
        self.own = f"{name[0]}:{name[1]}"
        self._decoder = FrameDecoder()
        self._opaque = 0

    def ask(
        self, code: int, ext: dict[str, str], body: bytes, *, oneway: bool = False, patience_s: float = 20.0
    ) -> Answer:
        self.socket.settimeout(patience_s)
        self._opaque += 1
        flag = FLAG_ONEWAY if oneway else 0
        request = RemotingCommand(code, self._opaque, flag, language="JAVA", ext=ext, body=body)
        self.socket.sendall(b"".join(encode_command(request)))
        if oneway:
            return Answer(0, None, {}, "")
        while True:
            while (frame := self._decoder.next_frame()) is None:
                data = self.socket.recv(1 << 18)
                if not data:
                    return Answer(CLOSED, None, {}, "")
                self._decoder.receive_data(data)
            answer = decode_command(frame)
            if answer.is_response and answer.opaque == self._opaque:
                return read_answer(answer)


@dataclass(slots=True)
class Player:
    """A name server and a broker. `answers` has the normalised answer of every step, under `scenario/step`."""

    namesrv: str
    broker: str
    broker_name: str
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: set[tuple[str, int]] = field(default_factory=set)
    _sent: list[str] = field(default_factory=list)
    _saved: dict[str, str] = field(default_factory=dict)
    _lines: dict[tuple[str, str], Line] = field(default_factory=dict)

    def play(self, scenario: Scenario) -> None:
        self._sent = [f"{step.ext} {step.body!r}" for step in scenario.steps if len(step.body) < _LARGE]
        self._saved = {"broker": self.broker, "namesrv": self.namesrv, "broker_name": self.broker_name}
        try:
            for step in scenario.steps:
                name = f"{scenario.name}/{step.name}"
                assert name not in self.answers, f"two steps named {name}"
                self.answers[name] = self._step(step)
                self.asked.add((step.to, step.code))
        finally:
            for line in self._lines.values():
                line.socket.close()
            self._lines.clear()

    def _step(self, step: Step) -> dict[str, Any]:
        answer = self._ask(step)
        deadline = time.monotonic() + min(_UNTIL_S, step.patience_s)
        while not self._holds(step, answer) and time.monotonic() < deadline:
            answer = self._ask(step)
        for name, path in step.save.items():
            self._saved[name] = str(at_path(answer.tree(), path))
            assert self._saved[name] != "None", f"{step.name}: nothing at {path} of {answer}"
        tree = self._normaliser().apply(answer)
        return tree | {"body": names_of(tree.get("body"))} if step.names_only else tree

    def _holds(self, step: Step, answer: Answer) -> bool:
        return all(at_path(answer.tree(), path) == value for path, value in step.until.items())

    def _ask(self, step: Step) -> Answer:
        key = (step.to, step.line)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(self.broker if step.to == BROKER else self.namesrv)
            assert step.to in (BROKER, NAMESRV)
        ext = {name: self._fill(value) for name, value in step.ext.items()}
        try:
            answer = line.ask(step.code, ext, self._body(step.body), oneway=step.oneway, patience_s=step.patience_s)
        except ConnectionError:
            answer = Answer(CLOSED, None, {}, "")
        except TimeoutError:
            answer = Answer(SILENT, None, {}, "")
        if answer.code == CLOSED:
            self._lines.pop(key).socket.close()
        return answer

    def _body(self, body: Body) -> bytes:
        if isinstance(body, bytes):
            return body
        return self._fill(body if isinstance(body, str) else json.dumps(body)).encode()

    def _fill(self, value: object) -> str:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        known = {**self._saved, "now": str(_now_ms())}
        return _PLACEHOLDER.sub(lambda match: _place(known[match[1]]) if match[2] else known[match[1]], text)

    def _normaliser(self) -> Normaliser:
        names = {line.own: f"<client {name}>" for (_, name), line in self._lines.items()}
        names |= {self.broker: "<broker>", self.namesrv: "<namesrv>", self.broker_name: "<broker name>"}
        return Normaliser(names, _now_ms(), "\n".join(self._sent))


def _place(message_id: str) -> str:
    return str(parse_offset_msg_id(message_id)[2])


def _now_ms() -> int:
    return int(time.time() * 1000)
