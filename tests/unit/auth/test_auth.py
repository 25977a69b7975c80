"""Tests of policy decisions, permissions of requests, and refusals of a server with authentication."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from access import permissions
from access.guard import SignatureGuard, open_store
from access.model import AuthError, PermissionCheck, Policy, PolicyEntry, User, check_policy
from access.permissions import Need, of_owners, topic_need
from access.store import AuthTables
from access.wiring import guarded, make_guard
from broker.config import BrokerConfig
from broker.requests.table import ROUTES
from infra.config.properties import ConfigError, load, to_properties, update_live
from infra.disk.filesystem import RealDisk
from infra.net.limits import RemotingLimits
from infra.net.remoting_server import Connection, RemotingServer, open_connection
from infra.net.request_router import RequestRouter
from infra.process.startup import StartupError
from neve.remoting.body import loads_as
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from neve.remoting.signature import signed

ROOT = '{"username":"root","password":"root-secret"}'


def entry(resource: str, *actions: str, decision: str = "Allow", ips: tuple[str, ...] = ()) -> PolicyEntry:
    return PolicyEntry(resource, actions, ips, decision)


def allowed(rules: list[PolicyEntry], kind: str, name: str, *actions: str, source: str = "10.1.2.3") -> bool:
    return PermissionCheck([Policy("Custom", tuple(rules))], kind, frozenset(actions), source)(name)


def test_access_is_denied_without_a_matching_rule() -> None:
    rules = [entry("Topic:orders", "Pub")]
    assert allowed(rules, "Topic", "orders", "Pub")
    assert not allowed(rules, "Topic", "orders", "Sub")
    assert not allowed(rules, "Topic", "orders2", "Pub")
    assert not allowed(rules, "Group", "orders", "Pub")
    assert not allowed([], "Topic", "orders", "Pub")


def test_most_specific_pattern_decides_and_denial_wins_a_tie() -> None:
    rules = [entry("Topic:*", "All"), entry("Topic:pay*", "All", decision="Deny"), entry("Topic:pay-in", "Pub")]
    assert allowed(rules, "Topic", "orders", "Pub")
    assert not allowed(rules, "Topic", "pay-out", "Pub")
    assert allowed(rules, "Topic", "pay-in", "Pub")
    assert not allowed(rules, "Topic", "pay-in", "Sub")
    tie = [entry("Topic:a", "Pub"), entry("Topic:a", "Pub", decision="Deny")]
    assert not allowed(tie, "Topic", "a", "Pub")
    assert not allowed(tie[::-1], "Topic", "a", "Pub")


def test_rule_can_require_a_source_network() -> None:
    rules = [entry("*", "All", ips=("10.0.0.0/8", "::1"))]
    assert allowed(rules, "Topic", "a", "Pub")
    assert allowed(rules, "Topic", "a", "Pub", source="::1")
    assert not allowed(rules, "Topic", "a", "Pub", source="192.168.0.1")
    assert not allowed(rules, "Topic", "a", "Pub", source="")


def test_default_rules_apply_without_a_matching_custom_rule() -> None:
    policies = [
        Policy("Default", (entry("Topic:*", "Pub"),)),
        Policy("Custom", (entry("Topic:a", "Pub", decision="Deny"),)),
    ]
    decide = PermissionCheck(policies, "Topic", frozenset({"Pub"}), "")
    assert not decide("a")
    assert decide("b")


def test_most_specific_of_many_matching_rules_decides() -> None:
    chosen = random.Random(1)

    def fits(rule: PolicyEntry, kind: str, name: str, action: str, source: str) -> bool:
        own_kind, _, pattern = rule.resource.partition(":")
        if rule.resource != "*" and (
            own_kind != kind or not (name.startswith(pattern[:-1]) if pattern[-1] == "*" else name == pattern)
        ):
            return False
        return {"All", action} & {*rule.actions} != set() and (not rule.source_ips or source in rule.source_ips)

    def decided(policies: list[Policy], kind: str, name: str, actions: frozenset[str], source: str) -> bool:
        for wanted in ("Custom", "Default"):
            rules = [rule for policy in policies if policy.policy_type == wanted for rule in policy.entries]
            found = [[rule for rule in rules if fits(rule, kind, name, action, source)] for action in actions]
            if any(of and max(of, key=lambda rule: rule.rank).decision == "Allow" for of in found):
                return True
            if any(found):
                return False
        return False

    patterns = ["*", *(f"{kind}:{name}" for kind in ("Topic", "Group") for name in ("*", "a*", "ab*", "a", "ab", "b"))]
    told = {True: 0, False: 0}
    for _ in range(300):
        policies = [
            Policy(
                chosen.choice(("Custom", "Default")),
                tuple(
                    entry(
                        chosen.choice(patterns),
                        *chosen.sample(("All", "Pub", "Sub", "Get"), chosen.randint(1, 2)),
                        decision=chosen.choice(("Allow", "Deny")),
                        ips=chosen.choice(((), (), ("10.0.0.1",))),
                    )
                    for _ in range(chosen.randint(1, 6))
                ),
            )
            for _ in range(chosen.randint(0, 3))
        ]
        for kind in ("Topic", "Group"):
            for actions in (frozenset({"Sub"}), frozenset({"Pub", "Sub"})):
                for source in ("10.0.0.1", "10.0.0.2", ""):
                    decide = PermissionCheck(policies, kind, actions, source)
                    for name in ("", "a", "ab", "abc", "b", "c"):
                        found = decide(name)
                        assert found == decided(policies, kind, name, actions, source), (policies, kind, name)
                        told[found] += 1
    assert min(told.values()) > 1_000


async def test_heartbeat_decision_is_cached_until_policies_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the owners of its retry topics invalidates it as well."""
    read: list[int] = []

    def counted(body: bytes, kind: Any) -> Any:
        read.append(len(body))
        return loads_as(body, kind)

    monkeypatch.setattr(permissions, "loads_as", counted)
    settings = ["authenticationEnabled=true", "authorizationEnabled=true", f"initAuthenticationUser={ROOT}"]
    owners: list[tuple[str, str | None]] = [("g", None)]

    config = load(BrokerConfig, None, settings)
    guard = make_guard(config, tmp_path / "auth.json", RealDisk(), ROUTES, cluster="c", retry_owners=lambda _: owners)
    assert isinstance(guard, SignatureGuard)

    async def let(*rules: PolicyEntry) -> None:
        def edit(tables: AuthTables) -> None:
            for name in ("one", "two"):
                tables.users[name] = User(f"{name}-secret")
            tables.policies["User:one"] = [Policy("Custom", rules)]

        await guard.store.change(edit)

    topics = [*(f"t-{number}" for number in range(50)), "%RETRY%g"]
    consumer = {"groupName": "g", "subscriptionDataSet": [{"topic": topic} for topic in topics]}
    body = json.dumps({"clientID": "A", "consumerDataSet": [consumer]}).encode()
    first, second = (Connection(RequestRouter(), RemotingLimits()) for _ in range(2))

    def refusal(connection: Connection, body: bytes = body, user: str = "one") -> str | None:
        ext = signed(user, f"{user}-secret", {}, body)
        return guard.refusal(connection, RemotingCommand(Code.HEART_BEAT, ext=ext, body=body))

    await let(entry("Topic:t-*", "Sub"), entry("Group:g", "Sub"))
    assert [refusal(first) for _ in range(4)] == [None] * 4
    assert len(read) == 1
    assert refusal(second) is None
    assert len(read) == 2

    assert "User:two has no permission" in str(refusal(first, user="two"))
    elsewhere = body.replace(b"t-7", b"u-7")
    assert "access Topic:u-7 (Sub)" in str(refusal(first, elsewhere))
    assert "access Topic:u-7 (Sub)" in str(refusal(first, elsewhere))
    assert refusal(first) is None

    owners.append(("h", "other"))
    assert "access Group:h (Sub)" in str(refusal(first))
    owners.pop()
    assert refusal(first) is None

    await let(entry("Topic:t-*", "Sub"), entry("Topic:t-49", "Sub", decision="Deny"), entry("Group:g", "Sub"))
    assert "access Topic:t-49 (Sub)" in str(refusal(first))
    assert "access Topic:t-49 (Sub)" in str(refusal(second))

    assert refusal(first, b"[]") == "the request's body does not parse"


@pytest.mark.parametrize(
    "wrong",
    [
        entry("Topic:a*b", "Pub"),
        entry("Queue:a", "Pub"),
        entry("Topic:a", "Publish"),
        entry("Topic:a", "Pub", ips=("x",)),
    ],
)
def test_invalid_rules_are_refused(wrong: PolicyEntry) -> None:
    with pytest.raises(AuthError):
        check_policy(Policy("Custom", (wrong,)))


def test_retry_topic_needs_permission_of_its_group() -> None:
    pull = RemotingCommand(11, ext={"topic": "%RETRY%g", "consumerGroup": "g"})
    asked = [need for need in ROUTES[Code.PULL_MESSAGE].permission(pull, "c") if isinstance(need, Need)]
    needs = [one for need in asked for one in of_owners(need, lambda _: ())]
    assert {(need.kind, need.name, need.actions) for need in needs} == {("Group", "g", frozenset({"Sub"}))}


def test_ambiguous_retry_topic_needs_permission_of_all_owners() -> None:
    owners = (("a_b", None), ("a", "b"))
    needs = of_owners(topic_need("%RETRY%a_b", frozenset({"Sub"})), lambda _: owners)
    assert [(need.kind, need.name) for need in needs] == [("Group", "a_b"), ("Group", "a"), ("Topic", "b")]


def test_insecure_or_unusable_auth_settings_are_refused_at_start(tmp_path: Path) -> None:
    for settings in (
        ["authorizationEnabled=true"],
        ["authenticationEnabled=true"],
        ["authenticationEnabled=true", "initAuthenticationUser=root:root-secret"],
    ):
        with pytest.raises(StartupError) as refused:
            open_store(load(BrokerConfig, None, settings), tmp_path / "auth" / "auth.json", RealDisk())
        assert "root-secret" not in str(refused.value)


def test_shown_configuration_has_no_secrets() -> None:
    config = load(BrokerConfig, None, [f"initAuthenticationUser={ROOT}", "tls.server.mode=enforcing"])
    assert "root-secret" not in to_properties(config)
    assert "tlsServerMode=enforcing" in to_properties(config)
    with pytest.raises(ConfigError):
        update_live(config, {"tls.server.mode": "disabled"})


class SecuredServer:
    """A server with users and a handler for sends."""

    def __init__(self, path: Path) -> None:
        settings = ["authenticationEnabled=true", "authorizationEnabled=true", f"initAuthenticationUser={ROOT}"]
        router = RequestRouter()
        router.register(Code.SEND_MESSAGE, lambda _, request: RemotingCommand.response(request, 0))
        config = load(BrokerConfig, None, settings)
        handler = guarded(router, make_guard(config, path / "auth" / "auth.json", RealDisk(), ROUTES, cluster="c"))
        self.server = RemotingServer(handler, host="127.0.0.1")

    async def __aenter__(self) -> Connection:
        await self.server.start()
        self.connection = await open_connection("127.0.0.1", self.server.port)
        return self.connection

    async def __aexit__(self, *_: object) -> None:
        self.connection.close()
        await self.server.shutdown()


async def ask(
    connection: Connection, code: int, ext: dict[str, str] | None = None, body: object = None, user: str = "root"
) -> RemotingCommand:
    data = json.dumps(body).encode() if body is not None else b""
    fields = signed(user, f"{user}-secret", ext or {}, data)
    return await connection.invoke(RemotingCommand(code, ext=fields, body=data), 5)


async def make_alice(connection: Connection) -> None:
    user = {"username": "alice", "password": "alice-secret", "userType": "Normal"}
    assert (await ask(connection, 3001, {"username": "alice"}, user)).code == 0
    rules = [{"resource": "Topic:orders*", "actions": ["Pub"], "sourceIps": None, "decision": "Allow"}]
    acl = {"subject": "User:alice", "policies": [{"policyType": "Custom", "entries": rules}]}
    assert (await ask(connection, 3006, {"subject": "User:alice"}, acl)).code == 0


async def test_unsigned_and_forbidden_requests_get_code_16(tmp_path: Path) -> None:
    async with SecuredServer(tmp_path) as connection:
        await make_alice(connection)
        unsigned = await connection.invoke(RemotingCommand(Code.SEND_MESSAGE, ext={"topic": "orders"}), 5)
        assert unsigned.code == 16
        assert (await ask(connection, Code.SEND_MESSAGE, {"topic": "orders"}, user="mallory")).code == 16
        forged = RemotingCommand(Code.SEND_MESSAGE, ext=signed("root", "guess", {"topic": "orders"}))
        assert (await connection.invoke(forged, 5)).code == 16
        assert (await ask(connection, Code.SEND_MESSAGE, {"topic": "orders-1"}, user="alice")).code == 0
        assert (await ask(connection, Code.SEND_MESSAGE, {"topic": "other"}, user="alice")).code == 16
        assert (await ask(connection, Code.SEND_MESSAGE, {}, user="alice")).code == 16
        assert (await connection.invoke(RemotingCommand(9999), 5)).code == 16
        assert (await ask(connection, 9999, {}, user="alice")).code == 3
        assert (await ask(connection, 9999, {})).code == 3


def test_handler_without_a_permission_is_refused(tmp_path: Path) -> None:
    settings = ["authenticationEnabled=true", f"initAuthenticationUser={ROOT}"]
    guard = make_guard(load(BrokerConfig, None, settings), tmp_path / "auth.json", RealDisk(), ROUTES, cluster="c")
    router = RequestRouter()
    router.register(9999, lambda _, request: RemotingCommand.response(request, 0))
    with pytest.raises(ValueError, match=r"without a permission: \[9999\]"):
        guarded(router, guard)


async def test_authentication_failures_have_distinct_remarks(tmp_path: Path) -> None:
    """The remarks equal those of RocketMQ (DefaultAuthenticationHandler)."""

    async with SecuredServer(tmp_path) as connection:
        await make_alice(connection)
        eve = {"username": "eve", "password": "eve-secret", "userType": "Normal", "userStatus": "disable"}
        assert (await ask(connection, 3001, {"username": "eve"}, eve)).code == 0
        assert (await ask(connection, 3002, {"username": "eve"}, eve)).code == 0
        command = RemotingCommand(Code.GET_ALL_TOPIC_CONFIG)
        assert "username cannot be null" in str((await connection.invoke(command, 10)).remark)
        for name, secret, remark in (
            ("bob", "alice-secret", "User:bob is not found."),
            ("b\nb", "alice-secret", "User:'b\\nb' is not found."),
            ("eve", "eve-secret", "User:eve is disabled."),
            ("alice", "wrong", "check signature failed."),
        ):
            command = RemotingCommand(Code.GET_ALL_TOPIC_CONFIG, ext=signed(name, secret, {}))
            answer = await connection.invoke(command, 10)
            assert (answer.code, answer.remark) == (16, remark)


async def test_users_and_policies_persist_and_secrets_are_not_returned(tmp_path: Path) -> None:
    async with SecuredServer(tmp_path) as connection:
        await make_alice(connection)
    async with SecuredServer(tmp_path) as connection:
        for code, ext in ((3004, {"username": "alice"}), (3005, {}), (3009, {"subject": "User:alice"}), (3010, {})):
            answer = await ask(connection, code, ext)
            assert answer.code == 0
            assert b"alice" in answer.body
            assert b"secret" not in answer.body
        assert (await ask(connection, 3002, {"username": "alice"}, {"userStatus": "disable"})).code == 0
        assert (await ask(connection, Code.SEND_MESSAGE, {"topic": "orders"}, user="alice")).code == 16
        assert (await ask(connection, 3002, {"username": "alice"}, {"userStatus": "enable"})).code == 0
        assert (await ask(connection, 3008, {"subject": "User:alice", "resource": "Topic:orders*"})).code == 0
        assert (await ask(connection, Code.SEND_MESSAGE, {"topic": "orders"}, user="alice")).code == 16
        assert (await ask(connection, 3009, {"subject": "User:alice"})).code == 3002
        assert (await ask(connection, 3003, {"username": "alice"})).code == 0
        assert (await ask(connection, 3004, {"username": "alice"})).code == 3001
    assert (tmp_path / "auth").stat().st_mode & 0o077 == 0


async def test_only_super_users_manage_users(tmp_path: Path) -> None:
    async with SecuredServer(tmp_path) as connection:
        await make_alice(connection)
        everything = [{"resource": "*", "actions": ["All"], "decision": "Allow"}]
        acl = {"policies": [{"policyType": "Custom", "entries": everything}]}
        assert (await ask(connection, 3007, {"subject": "User:alice"}, acl)).code == 0
        for code in range(3001, 3011):
            answer = await ask(connection, code, {"username": "bob"}, {"password": "p"}, user="alice")
            assert answer.code == 16
