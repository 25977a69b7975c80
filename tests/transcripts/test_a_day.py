"""A day of an operator and of a developer at the command line, with neve and with Apache RocketMQ 5.3.3.

Both run the same commands, except that those of the archive run only with neve. The output is in `golden/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.server.apache import ApacheServer
from tests.kit.server.neve import NeveServer
from tests.transcripts.shell import CommandLine, Shell

LINES = "".join(f"order {number}\n" for number in range(20))
SETTINGS = {"enablePropertyFilter": "true", "transactionCheckMax": "15"}

OPERATOR = (
    CommandLine("neve cluster list", until="DefaultCluster", measured=True),
    CommandLine("neve cluster show", measured=True),
    CommandLine("neve broker list", keep=("broker", r"(?m)^(\S+) +DefaultCluster"), measured=True),
    CommandLine("neve topic create orders --queues 1"),
    CommandLine("neve topic create payments --queues 4 --ttl 720h"),
    CommandLine("neve topic create orders"),
    CommandLine("neve topic list"),
    CommandLine("neve produce orders --quiet --tags new --order-key all", stdin=LINES),
    CommandLine("neve topic show orders", until=" 20 "),
    CommandLine("neve topic show orders --tiers"),
    CommandLine("neve topic set payments --queues 8"),
    CommandLine("neve topic ttl set payments 90d --yes"),
    CommandLine("neve topic ttl show payments"),
    CommandLine("neve topic set orders --perm r"),
    CommandLine("neve produce orders refused"),
    CommandLine("neve topic set orders --perm rw"),
    CommandLine("neve consume orders --group billing --count 5"),
    CommandLine("neve group list", until="billing.* 15"),
    CommandLine("neve group lag billing", until=" 15 "),
    CommandLine("neve group show billing"),
    CommandLine("neve group members billing"),
    CommandLine("neve group reset billing --topic orders --to-earliest --dry-run"),
    CommandLine("neve group reset billing --topic orders --queue 0 --to-offset 18 --yes"),
    CommandLine("neve group lag billing", until=" 18 "),
    CommandLine("neve broker config show {broker} transactionCheckMax"),
    CommandLine("neve broker config set {broker} transactionCheckMax=17"),
    CommandLine("neve broker config show {broker} transactionCheckMax"),
    CommandLine("neve broker config set {broker} noSuchKey=1"),
    CommandLine("neve broker config unset {broker} --all"),
    CommandLine("neve archive offload --roll --evict --admin {admin}", only="neve", silent=True),
    CommandLine("neve archive list --admin {admin}", only="neve"),
    CommandLine("neve topic show orders --tiers", only="neve"),
    CommandLine("neve archive verify --admin {admin}", only="neve"),
    CommandLine("neve consume orders --last 2", until="19"),
    CommandLine("neve topic trim orders --queue 0 --before-offset 3 --dry-run"),
    CommandLine("neve topic trim orders --queue 0 --before-offset 3 --yes --admin {admin}", only="neve"),
    CommandLine("neve top orders --once", measured=True),
    CommandLine("neve bench latency --messages 20 --rate 100", measured=True),
    CommandLine("neve broker set {broker} --no-writes --yes", measured=True),
    CommandLine("neve produce orders nowhere"),
    CommandLine("neve broker set {broker} --writes", measured=True),
    CommandLine("neve export {export} -t orders"),
    CommandLine("neve dlq list"),
    CommandLine("neve user list"),
    CommandLine("neve broker drain {broker} --yes --within 0", measured=True),
    CommandLine("neve consume orders --group billing --count 2"),
    CommandLine("neve broker drain {broker} --yes --within 60", measured=True),
    CommandLine("neve group delete billing --yes"),
    CommandLine("neve group lag billing"),
    CommandLine("neve topic delete payments --yes"),
    CommandLine("neve topic list"),
)

DEVELOPER = (
    CommandLine("neve context create dev -n {namesrv} --use"),
    CommandLine("neve context list"),
    CommandLine("neve topic create orders --queues 1"),
    CommandLine("neve produce orders 'the first' -k 41 --tags new -p colour=red", keep=("first", r'"msg_id": "(\w+)"')),
    CommandLine("neve produce orders -K : -H '|' --quiet", stdin="42:colour=blue|second\n43:colour=red|third\n"),
    CommandLine("neve produce orders --file {file}"),
    CommandLine("neve produce orders --json --quiet", stdin='{"body": "fifth", "keys": ["45"], "tags": "old"}\n'),
    CommandLine("neve produce orders --json", stdin='{"body": "sixth"}\n{"body": 7}\n'),
    CommandLine("neve produce 'no such' hello"),
    CommandLine("neve consume orders"),
    CommandLine("neve consume orders --last 1"),
    CommandLine(r"neve consume orders -F '%q:%o %k %g %h %s\n'"),
    CommandLine("neve consume orders --queue 0 --offsets 1:3"),
    CommandLine("neve consume orders --from -1h --tags old"),
    CommandLine("neve consume orders --sql \"colour = 'red'\""),
    CommandLine("neve consume orders --last 1 -o json"),
    CommandLine("neve consume orders --from yesterday"),
    CommandLine("neve consum orders"),
    CommandLine("neve consume nowhere"),
    CommandLine("neve message show -t orders --key 42 -o body", until="second"),
    CommandLine("neve message show {first} -t orders", until="first"),
    CommandLine("neve message show -t orders --queue 0 --offset 9"),
    CommandLine("neve message show -t orders --at -1h -o body"),
    CommandLine("neve message trace {first}"),
    CommandLine("neve consume orders --group billing --count 6"),
    CommandLine("neve group lag billing", until=" 0 "),
    CommandLine("neve message resend {first} -t orders -g billing"),
    CommandLine("neve consume orders --group billing --count 1"),
    CommandLine("neve produce orders later --delay 1 --quiet"),
    CommandLine("neve consume orders --last 1", until="later"),
    CommandLine("neve group reset billing --topic orders --queue 0 --to-offset 5 --yes"),
    CommandLine("neve consume orders --group billing --count 2"),
    CommandLine("neve dlq list billing"),
    CommandLine("neve topic show orders"),
    CommandLine("neve topic create copy --queues 1"),
    CommandLine("neve replay run day orders --into copy --keep-queues", measured=True),
    CommandLine("neve consume copy --count 2"),
    CommandLine("neve export {export} -t copy"),
    CommandLine("neve bench produce --messages 50", measured=True),
    CommandLine("neve topic delete copy --yes"),
    CommandLine("neve topic list"),
    CommandLine("neve context delete dev"),
)


@pytest.fixture(params=["neve", pytest.param("apache", marks=pytest.mark.servers)])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Return the kind of cluster, and the names for its addresses."""
    names = {"export": str(tmp_path / "export")}
    with ExitStack() as stack:
        if request.param == "neve":
            settings = {
                **SETTINGS,
                "archiveWorkerPriority": "normal",
                "coldReadPriority": "normal",
                "archivePeriod": "1h",
            }
            neve = stack.enter_context(NeveServer(tmp_path / "neve", settings=settings))
            yield "neve", {**names, "namesrv": neve.namesrv, "admin": neve.admin}
            return
        apache = stack.enter_context(ApacheServer(tmp_path / "apache", heap="512m", settings=SETTINGS, quick=True))
        yield "apache", {**names, "namesrv": apache.namesrv}
        apache.kill()


def go_through(
    day: Sequence[CommandLine], name: str, cluster: tuple[str, dict[str, str]], capfd: pytest.CaptureFixture[str]
) -> None:
    kind, names = cluster
    shell = Shell(capfd, names)
    for step in day:
        if step.only in {"", kind}:
            shell.type(step)
    shell.compare(f"{name}-{kind}")


def test_operator_session_matches_its_transcript(
    cluster: tuple[str, dict[str, str]], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", cluster[1]["namesrv"])
    go_through(OPERATOR, "operator", cluster, capfd)


def test_developer_session_matches_its_transcript(
    cluster: tuple[str, dict[str, str]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    monkeypatch.setenv("NEVE_CONTEXTS", str(tmp_path / "contexts.json"))
    monkeypatch.setenv("NEVE_REPLAYS", str(tmp_path / "replays"))
    file = tmp_path / "a.bin"
    file.write_bytes(b"fourth")
    cluster[1]["file"] = str(file)
    go_through(DEVELOPER, "developer", cluster, capfd)
