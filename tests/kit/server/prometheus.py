"""A Prometheus on loopback that scrapes targets, evaluates given rules, and answers queries."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

from tests.kit.clock.waiting import wait_until
from tests.kit.server.debian_package import ensure
from tests.kit.server.processes import Processes, free_ports

_READY_S = 60.0


class QueryFailed(Exception):
    """Prometheus cannot evaluate an expression; the message is its error."""


class Prometheus(Processes):
    """Scrapes every three seconds, because answers are slow on a busy machine."""

    def __init__(self, directory: Path, targets: Mapping[str, Sequence[str]], rules: Sequence[Path] = ()) -> None:
        """Create it; `targets` are addresses by job."""
        super().__init__(directory)
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self._config = directory / "prometheus.json"  # JSON is valid YAML.
        jobs = [
            {"job_name": job, "static_configs": [{"targets": list(addresses)}]} for job, addresses in targets.items()
        ]
        every = {"scrape_interval": "3s", "scrape_timeout": "3s", "evaluation_interval": "1s"}
        config = {"global": every, "scrape_configs": jobs, "rule_files": [str(path) for path in rules]}
        self._config.write_text(json.dumps(config))

    @override
    def start(self) -> Self:
        command = [
            str(ensure("prometheus")),
            f"--config.file={self._config}",
            f"--storage.tsdb.path={self.directory / 'series'}",
            f"--web.listen-address={self.address}",
        ]
        self.spawn(command, "prometheus.log")
        wait_until(self._is_ready, "Prometheus", _READY_S)
        return self

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=_READY_S) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):  # It reads its series first.
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return each series with its labels and current value; raise QueryFailed."""
        result = self._ask("query", query=expression)["result"]
        assert isinstance(result, list), result
        return result

    def value(self, expression: str) -> float | None:
        """Return the value of the only series, or None if there is none."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None

    def rules(self) -> list[dict[str, Any]]:
        """Return each rule with its state and health."""
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def _ask(self, what: str, **query: str) -> dict[str, Any]:
        url = f"http://{self.address}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=_READY_S) as answer:
                data = json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise QueryFailed(json.load(error).get("error")) from error
        assert isinstance(data, dict)
        return data
