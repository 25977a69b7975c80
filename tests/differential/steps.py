"""A scenario is a list of steps; a step is one request, as data.

Values may hold placeholders, filled in for each broker apart:

    ${broker} ${broker_name} ${namesrv}     the server's own addresses and name
    ${now}                                  ms since 1970, when the step is sent
    ${name:place}                           the place in the log that a saved offsetMsgId names
    ${name}                                 what an earlier step of the scenario saved under that name
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BROKER = "broker"
NAMESRV = "namesrv"
Body = bytes | str | dict[str, object]


@dataclass(frozen=True, slots=True)
class Step:
    """One request.

    `save` names parts of the answer for later steps: paths such as `ext.msgId` or `body.0.properties.POP_CK`.
    `until` is what the answer must hold before it counts: the request is sent again till then, with a deadline.
    `line` is the connection: clients are told apart by theirs.
    `names_only`: the body's values are measurements or settings of the machine; their names are compared.
    `patience_s` is how long an answer, or what is waited for, may take.
    """

    name: str
    code: int
    ext: Mapping[str, object] = field(default_factory=dict)
    body: Body = b""
    to: str = BROKER
    save: Mapping[str, str] = field(default_factory=dict)
    until: Mapping[str, object] = field(default_factory=dict)
    line: str = "main"
    oneway: bool = False
    names_only: bool = False
    patience_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Steps in their order, under the name that the page of differences uses."""

    name: str
    steps: tuple[Step, ...]
