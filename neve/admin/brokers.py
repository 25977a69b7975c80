"""Brokers: configuration, runtime figures, and whether producers send to them.

broker        25 change the configuration, 26 configuration, 28 runtime figures, 315 rates
name server   106 brokers, 205 withdraw write permission, 327 restore it
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from neve.admin.requests import ServerRequests, config_of
from neve.client.model import BrokerInfo
from neve.client.net.answers import parse_body, require_success
from neve.client.net.route import parse_brokers
from neve.remoting.codes import RequestCode, ResponseCode

# Apache's brokers answer with this exception until they have taken their first sample, one second after the start.
_NO_SAMPLE_YET = "java.util.NoSuchElementException"
_TRIES, _RETRY_S = 10, 0.5


class BrokerConfiguration(NamedTuple):
    """The configuration in force. `overridden` has the configured values of keys that were set on the running broker.

    Apache's brokers do not report the latter: it is None.
    """

    values: dict[str, str]
    overridden: dict[str, str] | None


class Brokers:
    """The brokers that the name servers know, and these name servers."""

    def __init__(self, requests: ServerRequests) -> None:
        self._requests = requests

    @property
    def known(self) -> Mapping[str, BrokerInfo]:
        """The brokers by name."""
        return self._requests.brokers

    @property
    def name_servers(self) -> Sequence[str]:
        """The addresses of the name servers."""
        return self._requests.name_servers

    def require(self, broker: str | None) -> list[str]:
        """Return the names of all brokers, or only `broker`.

        Raises:
            NotFound: the name servers know no broker of that name.
        """
        return self._requests.require(broker)

    async def known_to(self, name_server: str) -> dict[str, BrokerInfo]:
        """Return the brokers that one name server knows."""
        answer = await self._requests.ask(name_server, RequestCode.GET_BROKER_CLUSTER_INFO)
        return parse_brokers((parse_body(require_success(answer)).get("brokerAddrTable") or {}).values())

    # ---- figures

    async def runtime(self, broker: str) -> dict[str, str]:
        """Return the runtime figures of the master of a broker."""
        answer = await self._requests.ask_master(broker, RequestCode.GET_BROKER_RUNTIME_INFO)
        for _ in range(_TRIES - 1):
            if _NO_SAMPLE_YET not in (answer.remark or ""):
                break
            await asyncio.sleep(_RETRY_S)
            answer = await self._requests.ask_master(broker, RequestCode.GET_BROKER_RUNTIME_INFO)
        table = parse_body(require_success(answer)).get("table") or {}
        return {str(key): str(value) for key, value in table.items()}

    async def rate_of_last_minute(self, broker: str, stats: str, key: str) -> float:
        """Return a rate per second, as the master of a broker counted it; 0 if it counted nothing."""
        ext = {"statsName": stats, "statsKey": key}
        answer = await self._requests.ask_master(broker, RequestCode.VIEW_BROKER_STATS_DATA, ext)
        if answer.code == ResponseCode.SYSTEM_ERROR and "not exist" in (answer.remark or ""):
            return 0.0
        return float((parse_body(require_success(answer)).get("statsMinute") or {}).get("tps") or 0.0)

    # ---- configuration

    async def configuration(self, broker: str) -> BrokerConfiguration:
        """Return the configuration of the master of a broker."""
        answer = await self._requests.ask_master(broker, RequestCode.GET_BROKER_CONFIG)
        values = config_of(answer)
        kept = (answer.ext or {}).get("kept")
        if kept is None:
            return BrokerConfiguration(values, None)
        return BrokerConfiguration(values, {str(key): str(value) for key, value in json.loads(kept).items()})

    async def configure(self, broker: str, changes: Mapping[str, str], unset: Sequence[str] = ()) -> None:
        """Change keys of the running master of a broker, all or none; `unset` restores the configured values.

        Raises:
            BrokerError: the broker refused a key or value.
        """
        body = "".join(f"{key}={value}\n" for key, value in changes.items()).encode()
        ext = {"unset": ",".join(unset)} if unset else {}
        require_success(await self._requests.ask_master(broker, RequestCode.UPDATE_BROKER_CONFIG, ext, body))

    # ---- write permission

    async def withdraw_write_permission(self, broker: str) -> dict[str, int]:
        """Remove a broker from the routes of producers; return the number of topics by name server."""
        return await self._at_name_servers(broker, RequestCode.WIPE_WRITE_PERM_OF_BROKER, "wipeTopicCount")

    async def restore_write_permission(self, broker: str) -> dict[str, int]:
        """Return a broker to the routes of producers; return the number of topics by name server."""
        return await self._at_name_servers(broker, RequestCode.ADD_WRITE_PERM_OF_BROKER, "addTopicCount")

    async def _at_name_servers(self, broker: str, code: RequestCode, count_field: str) -> dict[str, int]:
        """Ask each name server: they do not tell each other, and a client uses any of them."""
        counts = {}
        for address in self._requests.name_servers:
            answer = await self._requests.ask(address, code, {"brokerName": broker})
            counts[address] = int((require_success(answer).ext or {}).get(count_field) or 0)
        return counts
