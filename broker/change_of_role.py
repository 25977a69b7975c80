"""What a change of role is for what the broker keeps besides its log (`broker.ha.replicas_manager`: Books).

              the log                          tables                        what waits, what is popped
slave         takes its master's bytes alone   follow the log; where         lies in the log; the books stand still
                                               groups stand is polled
to master     confirmed to its end, then       followed to its end, no       read again, as at a start
              open for own records             group above a queue's end
to slave      closed for own records, at once  as the new master says        nothing is brought on its way

To master is one turn of the loop: nobody finds it half done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from broker.clients.registration import Registration
from broker.ha.reign import Reign
from broker.loading import Loaded, load_all
from broker.metadata.metadata_log import MetadataLog
from broker.metadata.slave_synchronize import Master, SlaveSynchronize
from broker.store.message_store import MessageStore
from broker.tables.topic_config_manager import TopicConfigManager

log = logging.getLogger(__name__)


class ChangeOfRole:
    """See the module. On the loop."""

    def __init__(
        self,
        store: MessageStore,
        reign: Reign,
        *,
        metadata: MetadataLog,
        synchronize: SlaveSynchronize,
        topics: TopicConfigManager,
        pops: Loaded,
        timers: Loaded,
        transactions: Loaded,
        registration: Registration,
        go_on: Callable[[], None],
    ) -> None:
        """`go_on`: the log does so above all that its archive names."""
        self._store, self._reign = store, reign
        self._metadata, self._synchronize, self._topics = metadata, synchronize, topics
        self._pops, self._timers, self._transactions = pops, timers, transactions
        self._registration, self._go_on = registration, go_on

    def lead(self, epoch: int) -> None:
        """All of the log is confirmed: it takes this broker's own records from now on, of this epoch.

        Raises StoreError, StartupError and UnreadableChange: then the log is a slave's as before.
        """
        store = self._store
        assert store.confirmed_offset == store.max_physical_offset, "readers see all of it"
        self._synchronize.forget()
        store.lead()
        self._reign.leads = True
        try:
            self._go_on()
            # First: where a crash tore the end of a transaction from its mark, that is appended before all else.
            load_all((self._transactions, self._timers, self._pops))
            for line in self._metadata.lead():
                log.warning("group offset above the end of its queue: %s", line)
            self._topics.lead(epoch)
        except BaseException:
            self.follow()
            raise

    def follow(self) -> None:
        """From this instant on the log takes nothing of its own."""
        self._reign.leads = False
        self._store.follow()

    def confirmed(self) -> None:
        """A slave's log shows more."""
        self._synchronize.advance()

    def following(self, address: str, epoch: int) -> None:
        """All that is here is of this master's log."""
        self._synchronize.follow(Master(address, epoch))

    def roles_changed(self) -> None:
        """The name servers hear it."""
        self._registration.soon()
