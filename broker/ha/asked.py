"""Protocol of a Remoting request to another broker, as callers that query a master see it.

`broker.clients.master_api` implements it.
"""

from __future__ import annotations

from typing import Protocol

from neve.remoting.codes import RequestCode
from neve.remoting.command import RemotingCommand


class RequestClient(Protocol):
    """Remoting client for single requests. A package that needs more extends this protocol."""

    async def ask(self, address: str, code: RequestCode, ext: dict[str, str]) -> RemotingCommand:
        """Return the answer, whose code is SUCCESS. Raise OSError, TimeoutError or NeveError."""
