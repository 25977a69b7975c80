"""Tasks of a running broker. docs/dev/tasks.md has each of them."""

from __future__ import annotations

import functools
import logging

from broker.ha.replicas_manager import TICK_S
from broker.intake.flusher import Flusher
from broker.life import BrokerLife
from broker.store.errors import StoreFull
from broker.store.message_store import MessageStore
from broker.waiting.schedule_message import ScheduleMessage
from broker.waiting.timer_message import TimerMessages
from broker.wiring.parts import BrokerParts
from broker.wiring.server import Ports

log = logging.getLogger(__name__)

_TICK = 1.0
_REVIVE_PERIOD = 0.5
_SCHEDULE_PERIOD = 0.1
_IDLE_POPS = 300.0
_CLIENT_SCAN = 10.0
_SLAVE_DEADLINES = 0.25
_LOOK_AT_MASTER = 2.0


def start_tasks(parts: BrokerParts, ports: Ports) -> None:
    """Start all tasks. The supervisor of the parts ends them."""
    runtime, storage, messages, service = parts.runtime, parts.storage, parts.messages, parts.service
    config, supervisor, every, flusher = runtime.config, runtime.supervisor, runtime.supervisor.every, storage.flusher
    life, registration = runtime.life, parts.replicas.registration
    storage.store.visibility.subscribe(service.arriving.appended)
    supervisor.vital("flush", flusher.run, functools.partial(_flusher_ended, flusher))
    supervisor.keep("register", registration.keep)
    every("schedule", _SCHEDULE_PERIOD, functools.partial(_deliver, messages.schedule, life, flusher))
    every("timers", _SCHEDULE_PERIOD, functools.partial(_deliver, messages.timers, life, flusher))
    every("held-pulls", _TICK, service.hold.check_deadlines)
    every("flush-deadlines", _TICK, flusher.check_deadlines)
    if storage.group_transfer is not None:
        every("slave-deadlines", _SLAVE_DEADLINES, storage.group_transfer.check_deadlines)
    if parts.archive.synchronize is not None:
        supervisor.keep("synchronize", parts.archive.synchronize.run)
    if parts.replicas.manager is not None and parts.replicas.change_of_role is not None:
        supervisor.keep("broker-set", parts.replicas.manager.run)
        every("broker-set-tick", TICK_S, parts.replicas.manager.tick, first_s=0.0)
        every("follow-pops", _TICK, parts.replicas.change_of_role.follow_pops)
    if parts.archive.plain_slave is not None:
        supervisor.keep("follow-master", parts.archive.plain_slave.run)
        every("slave", _TICK, parts.archive.plain_slave.tick)
        if config.store_url:
            every("look-at-master", _LOOK_AT_MASTER, parts.archive.plain_slave.look)
    every("disk-mark", _TICK, service.disk_mark.look)
    every("conditions", _TICK, ports.conditions.look)
    every("totals", _TICK, service.totals.sample)
    every("stats", _TICK, service.stats.sample)
    every("pop-revive", _REVIVE_PERIOD, service.revive.run_due)
    every("idle-pop-queues", _IDLE_POPS, messages.pops.drop_idle)
    every("check-back", config.transaction_check_interval / 1000, service.check_back.run)
    every("prepare-log", _TICK, functools.partial(runtime.threads.run, _prepare_log, storage.store))
    every("clients", _CLIENT_SCAN, service.clients.expire)
    every("queue-locks", _CLIENT_SCAN, service.locks.expire)
    every("register-period", config.register_name_server_period / 1000, registration.now)
    every("persist", config.flush_consumer_offset_interval / 1000, messages.persistence.run)
    life.started()


def _deliver(waiting: ScheduleMessage | TimerMessages, life: BrokerLife, flusher: Flusher) -> None:
    if life.accepting and waiting.deliver_due():
        flusher.sync_soon()


def _prepare_log(store: MessageStore) -> None:
    try:
        store.prepare_next()
    except StoreFull as error:
        log.warning("no room for the next log file: %s", error)


def _flusher_ended(flusher: Flusher, error: BaseException | None) -> None:
    flusher.fail(error or RuntimeError("the flusher ended"))
