"""`docs/reference/compatibility.md` states for every request code how the servers answer it."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand, decode_command, encode_command
from neve.remoting.frame import FrameDecoder
from tests.kit.server.neve import Serving, settings_as_options

if TYPE_CHECKING:
    from collections.abc import Iterable

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"
ROW = re.compile(
    r"^\| (\d+) \| (\w+) \| (broker|name server|controller|broker → client) \| (yes|not yet|refused)\b", re.MULTILINE
)


def documented() -> dict[int, tuple[str, str, str]]:
    return {int(code): (name, where, state) for code, name, where, state in ROW.findall(PAGE.read_text("utf-8"))}


def answers(address: str, codes: Iterable[int]) -> dict[int, int]:
    """Return the response code to an empty request of each code, without header fields or body."""
    host, port = address.rsplit(":", 1)
    given: dict[int, int] = {}
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        decoder = FrameDecoder()
        for code in codes:
            connection.sendall(b"".join(encode_command(RemotingCommand(code=code, opaque=code))))
            while (frame := decoder.next_frame()) is None:
                received = connection.recv(1 << 16)
                assert received, f"code {code} closed the connection"
                decoder.receive_data(received)
            answer = decode_command(frame)
            assert answer.opaque == code
            given[code] = answer.code
    return given


def test_page_lists_every_request_code_by_name() -> None:
    page = documented()
    assert {int(code): code.name for code in RequestCode} == {code: row[0] for code, row in page.items()}


def test_servers_support_exactly_the_request_codes_the_page_marks(neve_up: Any, tmp_path: Path) -> None:
    page = documented()
    unsupported = int(ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
    alone = settings_as_options({"listenPort": 0, "bindAddress": "127.0.0.1", "controllerStorePath": tmp_path / "c"})
    with neve_up(tmp_path) as neve, Serving(tmp_path / "controller", "controller", *alone) as controller:
        addresses = {"broker": neve.broker, "name server": neve.namesrv, "controller": controller.ready["controller"]}
        for where, address in addresses.items():
            codes = [code for code, row in page.items() if row[1] == where]
            for code, answer in answers(address, codes).items():
                assert (answer != unsupported) == (page[code][2] == "yes"), (code, page[code], answer)
