"""Send the same requests to Apache RocketMQ 5.3.3 and to neve.

`docs/reference/compatibility.md` lists each differing answer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.differential.answers import Difference, differences
from tests.differential.replay import Player
from tests.differential.scenarios import administration, consumers, namesrv, pops, pulls, queries, sends
from tests.kit.server.apache import ApacheServer
from tests.kit.server.neve import NeveServer

pytestmark = pytest.mark.servers
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"
#: The last one changes settings.
_PARTS = (sends, pulls, consumers, queries, pops, namesrv, administration)
SCENARIOS = tuple(scenario for part in _PARTS for scenario in part.SCENARIOS)
#: Supported codes that no scenario contains, and the reason.
NOT_COMPARED = {
    39: "the broker asks the client",
    40: "the broker tells the client",
    221: "the broker asks the client",
    326: "the broker tells the client",
    906: "of members of a set: held against Apache's in tests/interop/test_apache_master.py",
    1008: "a controller tells the members of its set",
    # Codes of the controller, which is compared with Apache's in tests/interop/test_controller.py.
    **dict.fromkeys((1001, 1002, 1003, 1004, 1005, 1006, 1009, 1010, 1011, 1012, 1013), "the controller's"),
}
#: Settings of both brokers; the rest are defaults. Checks of open transactions would occur at unpredictable times.
SETTINGS = {"enablePropertyFilter": "true", "recallMessageEnable": "true", "transactionCheckInterval": "600000"}


@dataclass(frozen=True, slots=True)
class PageRow:
    """One row of the page: requests and fields as patterns."""

    requests: tuple[str, ...]
    fields: tuple[str, ...]

    def covers(self, difference: Difference) -> bool:
        by_request = any(fnmatchcase(difference.answer, pattern) for pattern in self.requests)
        return by_request and any(fnmatchcase(difference.field, pattern) for pattern in self.fields)


def listed() -> list[PageRow]:
    _, _, section = PAGE.read_text("utf-8").partition("## Different answers")
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line[:3] == "| `"
    ]
    assert all(len(row) == 5 for row in rows), rows
    return [PageRow(tuple(re.findall(r"`([^`]+)`", row[0])), tuple(row[1].split(", "))) for row in rows]


@pytest.fixture(scope="module")
def players(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Player, Player]]:
    """Return both servers after all scenarios were played on them."""
    with ExitStack() as stack:
        home = tmp_path_factory.mktemp("differential")
        apache = stack.enter_context(ApacheServer(home / "apache", heap="512m", settings=SETTINGS, quick=True))
        neve = stack.enter_context(NeveServer(home / "neve", settings=SETTINGS))
        pair = (
            Player(apache.namesrv, apache.broker, "stock"),
            Player(neve.namesrv, neve.broker, "broker-a"),
        )
        with ThreadPoolExecutor(2) as pool:
            for _ in pool.map(_play_all, pair):
                pass
        yield pair
        apache.kill()  # Its data is not read again, and an orderly stop takes seconds.


def _play_all(player: Player) -> None:
    for scenario in SCENARIOS:
        player.play(scenario)


@pytest.fixture(scope="module")
def found(players: tuple[Player, Player]) -> dict[str, list[Difference]]:
    """Return the differences of each scenario."""
    apache, neve = players
    result: dict[str, list[Difference]] = defaultdict(list)
    for name, answer in apache.answers.items():
        result[name.partition("/")[0]] += differences(name, answer, neve.answers[name])
    return result


@pytest.mark.parametrize("scenario", [scenario.name for scenario in SCENARIOS])
def test_answers_are_equal_except_for_listed_differences(scenario: str, found: dict[str, list[Difference]]) -> None:
    rows = listed()
    unlisted = [difference for difference in found[scenario] if not any(row.covers(difference) for row in rows)]
    assert not unlisted, "\n".join(map(str, unlisted))


def test_every_supported_code_is_compared(players: tuple[Player, Player]) -> None:
    asked = {code for _, code in players[0].asked}
    rows = re.findall(r"^\| (\d+) \| \w+ \| [^|]+ \| yes \|", PAGE.read_text("utf-8"), re.MULTILINE)
    supported = {int(code) for code in rows}
    assert len(supported) > 80
    assert supported - asked == NOT_COMPARED.keys()


def test_every_listed_difference_still_exists(found: dict[str, list[Difference]]) -> None:
    everything = [difference for part in found.values() for difference in part]
    for row in listed():
        for pattern in row.requests:
            for field in row.fields:
                alone = PageRow((pattern,), (field,))
                assert any(map(alone.covers, everything)), f"no longer different: {pattern} {field}"
