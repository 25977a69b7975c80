"""How a broker is asked by Remoting, as those who ask a master see it (`broker.clients.master_api`)."""

from __future__ import annotations

from typing import Protocol

from neve.remoting.codes import RequestCode
from neve.remoting.command import RemotingCommand


class Asked(Protocol):
    """See the module. A room that needs more of it says so on top."""

    async def ask(self, address: str, code: RequestCode, ext: dict[str, str]) -> RemotingCommand:
        """The answer, a success. Raises OSError, TimeoutError and NeveError."""
