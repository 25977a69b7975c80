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
from tests.transcripts.shell import Shell, Step

LINES = "".join(f"order {number}\n" for number in range(20))
SETTINGS = {"enablePropertyFilter": "true", "transactionCheckMax": "15"}

OPERATOR = (
    Step("neve cluster list", until="DefaultCluster", measured=True),
    Step("neve cluster show", measured=True),
    Step("neve broker list", keep=("broker", r"(?m)^(\S+) +DefaultCluster"), measured=True),
    Step("neve topic create orders --queues 1"),
    Step("neve topic create payments --queues 4 --ttl 720h"),
    Step("neve topic create orders"),
    Step("neve topic list"),
    Step("neve produce orders --quiet --tags new --order-key all", stdin=LINES),
    Step("neve topic show orders", until=" 20 "),
    Step("neve topic show orders --tiers"),
    Step("neve topic set payments --queues 8"),
    Step("neve topic ttl set payments 90d --yes"),
    Step("neve topic ttl show payments"),
    Step("neve topic set orders --perm r"),
    Step("neve produce orders refused"),
    Step("neve topic set orders --perm rw"),
    Step("neve consume orders --group billing --count 5"),
    Step("neve group list", until="billing.* 15"),
    Step("neve group lag billing", until=" 15 "),
    Step("neve group show billing"),
    Step("neve group members billing"),
    Step("neve group reset billing --topic orders --to-earliest --dry-run"),
    Step("neve group reset billing --topic orders --queue 0 --to-offset 18 --yes"),
    Step("neve group lag billing", until=" 18 "),
    Step("neve broker config show {broker} transactionCheckMax"),
    Step("neve broker config set {broker} transactionCheckMax=17"),
    Step("neve broker config show {broker} transactionCheckMax"),
    Step("neve broker config set {broker} noSuchKey=1"),
    Step("neve broker config unset {broker} --all"),
    Step("neve archive offload --roll --evict --admin {admin}", only="neve", silent=True),
    Step("neve archive list --admin {admin}", only="neve"),
    Step("neve topic show orders --tiers", only="neve"),
    Step("neve archive verify --admin {admin}", only="neve"),
    Step("neve consume orders --last 2", until="19"),
    Step("neve topic trim orders --queue 0 --before-offset 3 --dry-run"),
    Step("neve topic trim orders --queue 0 --before-offset 3 --yes --admin {admin}", only="neve"),
    Step("neve top orders --once", measured=True),
    Step("neve bench latency --messages 20 --rate 100", measured=True),
    Step("neve broker set {broker} --no-writes --yes", measured=True),
    Step("neve produce orders nowhere"),
    Step("neve broker set {broker} --writes", measured=True),
    Step("neve export {export} -t orders"),
    Step("neve dlq list"),
    Step("neve user list"),
    Step("neve broker drain {broker} --yes --within 0", measured=True),
    Step("neve consume orders --group billing --count 2"),
    Step("neve broker drain {broker} --yes --within 60", measured=True),
    Step("neve group delete billing --yes"),
    Step("neve group lag billing"),
    Step("neve topic delete payments --yes"),
    Step("neve topic list"),
)

DEVELOPER = (
    Step("neve context create dev -n {namesrv} --use"),
    Step("neve context list"),
    Step("neve topic create orders --queues 1"),
    Step("neve produce orders 'the first' -k 41 --tags new -p colour=red", keep=("first", r'"msg_id": "(\w+)"')),
    Step("neve produce orders -K : -H '|' --quiet", stdin="42:colour=blue|second\n43:colour=red|third\n"),
    Step("neve produce orders --file {file}"),
    Step("neve produce orders --json --quiet", stdin='{"body": "fifth", "keys": ["45"], "tags": "old"}\n'),
    Step("neve produce orders --json", stdin='{"body": "sixth"}\n{"body": 7}\n'),
    Step("neve produce 'no such' hello"),
    Step("neve consume orders"),
    Step("neve consume orders --last 1"),
    Step(r"neve consume orders -F '%q:%o %k %g %h %s\n'"),
    Step("neve consume orders --queue 0 --offsets 1:3"),
    Step("neve consume orders --from -1h --tags old"),
    Step("neve consume orders --sql \"colour = 'red'\""),
    Step("neve consume orders --last 1 -o json"),
    Step("neve consume orders --from yesterday"),
    Step("neve consum orders"),
    Step("neve consume nowhere"),
    Step("neve message show -t orders --key 42 -o body", until="second"),
    Step("neve message show {first} -t orders", until="first"),
    Step("neve message show -t orders --queue 0 --offset 9"),
    Step("neve message show -t orders --at -1h -o body"),
    Step("neve message trace {first}"),
    Step("neve consume orders --group billing --count 6"),
    Step("neve group lag billing", until=" 0 "),
    Step("neve message resend {first} -t orders -g billing"),
    Step("neve consume orders --group billing --count 1"),
    Step("neve produce orders later --delay 1 --quiet"),
    Step("neve consume orders --last 1", until="later"),
    Step("neve group reset billing --topic orders --queue 0 --to-offset 5 --yes"),
    Step("neve consume orders --group billing --count 2"),
    Step("neve dlq list billing"),
    Step("neve topic show orders"),
    Step("neve topic create copy --queues 1"),
    Step("neve replay run day orders --into copy --keep-queues", measured=True),
    Step("neve consume copy --count 2"),
    Step("neve export {export} -t copy"),
    Step("neve bench produce --messages 50", measured=True),
    Step("neve topic delete copy --yes"),
    Step("neve topic list"),
    Step("neve context delete dev"),
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
    day: Sequence[Step], name: str, cluster: tuple[str, dict[str, str]], capfd: pytest.CaptureFixture[str]
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
