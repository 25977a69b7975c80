"""Requests of a member to its controllers: each runs in its own task, and its answer becomes an event."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from broker.ha.controller_calls import Identity, call_of, event_of, members_of
from broker.ha.controllers import Controllers, NoControllerAnswered
from broker.ha.epoch_file import StoredEpochs
from broker.ha.member import Member, State
from broker.ha.member_events import Ask, AskReplicaInfo, Event, Heartbeat, StockControllers
from neve.errors import NeveError
from neve.remoting.codes import ResponseCode

log = logging.getLogger(__name__)

_UNKNOWN_TO_CONTROLLERS = frozenset({State.NAMELESS, State.UNREGISTERED})


#: Runs a coroutine under a name: once, or restarted until it is cancelled.
Spawn = Callable[[str, Callable[[], Coroutine[Any, Any, object]]], "asyncio.Task[None]"]


class ControllerRequests:
    """Sender of the requests, with what their answers show besides events."""

    def __init__(
        self, controllers: Controllers, own: Identity, member: Member, epochs: StoredEpochs, spawn: Spawn
    ) -> None:
        self.controllers, self._own, self._member, self._epochs = controllers, own, member, epochs
        self._spawn = spawn
        self.sent: Counter[str] = Counter()  # by kind
        self.unanswered = 0
        self.registered = 0  # number of members, in sync or not, from neve's controllers; 0: unknown

    @property
    def knows_member(self) -> bool:
        """Return whether a controller has accepted this life of the member."""
        return self._member.state not in _UNKNOWN_TO_CONTROLLERS

    def send(self, ask: Ask, answered: Callable[[Event], None]) -> None:
        """Send a request. `answered` is called with the event of its answer, if that has one."""
        self._spawn("ask-controller", partial(self._send, ask, answered))

    async def _send(self, ask: Ask, answered: Callable[[Event], None]) -> None:
        controllers, broker_id = self.controllers, self._member.broker_id
        call = call_of(ask, self._own, broker_id, log_epoch=self._epochs.cache.last_epoch)
        self.sent[type(ask).__name__] += 1
        try:
            if isinstance(ask, Heartbeat):
                for answer in await controllers.send(call):
                    if answer.code != ResponseCode.SUCCESS:
                        log.warning("a controller refuses the heartbeat: %s", answer.remark)
                return
            answer = await controllers.ask(call)
            if controllers.are_stock:
                answered(StockControllers())
            broker_id, is_stock = self._member.broker_id, controllers.are_stock
            event = event_of(ask, answer, self._own, broker_id, is_known=self.knows_member, is_stock=is_stock)
        except NoControllerAnswered as error:
            self.unanswered += 1
            log.debug("no controller answers: %s", error.remark)
            return
        except (NeveError, ValueError) as error:
            log.warning("a controller's answer to %s can't be read: %s", type(ask).__name__, error)
            return
        if answer.code != ResponseCode.SUCCESS:
            log.info("a controller answers %s with %d: %s", type(ask).__name__, answer.code, answer.remark)
        if isinstance(ask, AskReplicaInfo) and answer.code == ResponseCode.SUCCESS:
            self.registered = members_of(answer.ext)
        if event is not None:
            answered(event)

    def withdraw(self) -> None:
        """Drop the connections, so that the controllers consider this life dead."""
        log.info("waiting until the controller notices that this member's former process has ended")
        self.controllers.hang_up()
