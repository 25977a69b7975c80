"""A controller: the real decisions with minimal surroundings: reports in memory, the register, requests.

If a write of a value is not confirmed, the controller does not answer, and the caller asks any controller again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from controller.broker_set import BrokerSet
from controller.decision import (
    Answer,
    Ask,
    Asked,
    Decision,
    Report,
    Request,
    Rules,
    Scan,
)
from tests.simulation.replicas.machines import Network, SimulatedProcess, Turns
from tests.simulation.replicas.register import HOST as REGISTER
from tests.simulation.replicas.register import Register

NAME, CLUSTER = "broker-a", "cluster"
SCAN_EVERY = 1.0
ASK_WITHIN = 0.5
TRIES = 5

Decide = Callable[[BrokerSet | None, Mapping[int, Report], Request, int, Rules], Decision | Ask]


class Controller(SimulatedProcess):
    def __init__(
        self, turns: Turns, network: Network, host: str, clock_base: float, decide: Decide, timeout_ms: int
    ) -> None:
        super().__init__(turns, host, clock_base)
        self.network, self.decide = network, decide
        self.timeout_ms = timeout_ms
        self.reports: dict[int, Report] = {}
        self.rules = Rules(elects_from_ms=self.now_ms() + timeout_ms)
        self.after(SCAN_EVERY, self._scan)

    def now_ms(self) -> int:
        return int(self.now() * 1000)

    def heartbeat(self, broker_id: int, report: Report) -> None:
        self.reports[broker_id] = dataclasses.replace(report, heard_ms=self.now_ms(), timeout_ms=self.timeout_ms)

    def closed(self, broker_id: int, process: str) -> None:
        """Handle the end of the connection of a member's process."""
        report = self.reports.get(broker_id)
        if report is not None and report.process == process:
            self.reports[broker_id] = dataclasses.replace(report, connected=False)
            self.handle(Scan(NAME), lambda answer: None)

    def _scan(self) -> None:
        self.handle(Scan(NAME), lambda answer: None)
        self.after(SCAN_EVERY, self._scan)

    def handle(
        self,
        request: Request,
        answer: Callable[[Answer], None],
        asked: Mapping[int, Asked] | None = None,
        tries: int = TRIES,
    ) -> None:
        def read(value: tuple[BrokerSet | None, int]) -> None:
            self._decide(request, answer, asked or {}, tries, value)

        self.network.ask(self, REGISTER, lambda register, reply: reply(register.get()), read)

    def _decide(
        self,
        request: Request,
        answer: Callable[[Answer], None],
        asked: Mapping[int, Asked],
        tries: int,
        value: tuple[BrokerSet | None, int],
    ) -> None:
        reports = {
            broker_id: dataclasses.replace(report, asked=asked.get(broker_id))
            for broker_id, report in self.reports.items()
        }
        decision = self.decide(value[0], reports, request, self.now_ms(), self.rules)
        if isinstance(decision, Ask):
            if tries:
                self._ask(request, answer, asked, tries, decision.candidates)
            return
        after = decision.broker_set
        if after is None:
            answer(decision.answer)
            return

        def written(done: bool) -> None:
            if done:
                answer(decision.answer)
                for member in decision.notify:
                    self._notify(after, member)
            elif tries:
                self.handle(request, answer, None, tries - 1)

        def write(register: Register, reply: Callable[[bool], None]) -> None:
            reply(register.put(after, value))

        self.network.ask(self, REGISTER, write, written)

    def _ask(
        self,
        request: Request,
        answer: Callable[[Answer], None],
        asked: Mapping[int, Asked],
        tries: int,
        candidates: tuple[int, ...],
    ) -> None:
        """Ask the candidates for their log ends; one that does not answer in time, or is another process, is absent."""
        heard: dict[int, Asked] = {**asked, **{broker_id: Asked(False) for broker_id in candidates}}
        missing = set(candidates)
        is_done = False

        def done() -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                self.handle(request, answer, heard, tries - 1)

        for broker_id in candidates:
            report = self.reports[broker_id]

            def told(value: tuple[str, int, int], broker_id: int = broker_id, report: Report = report) -> None:
                if value[0] == report.process:
                    heard[broker_id] = Asked(True, value[1], value[2])
                missing.discard(broker_id)
                if not missing:
                    done()

            self.network.ask(self, report.address, lambda broker, reply: reply(broker.epoch_cache()), told)
        self.after(ASK_WITHIN, done)

    def _notify(self, value: BrokerSet, member: int) -> None:
        told = value.member(member)
        if told is not None:
            self.network.post(self, told.address, lambda broker: broker.notified(view_of(value)))


def view_of(value: BrokerSet) -> dict[str, Any]:
    """Return the fields of a 1008."""
    master = value.member(value.master)
    return {
        "master": value.master,
        "master_address": master.address if master is not None else "",
        "master_epoch": value.master_epoch,
        "sync_state_set": frozenset(value.sync_state_set),
        "sync_state_set_epoch": value.sync_state_set_epoch,
    }
