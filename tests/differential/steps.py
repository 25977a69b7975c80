"""A scenario is a list of steps; a step is one request, as data.

Values may have placeholders, which are filled in for each broker separately:

    ${broker} ${broker_name} ${namesrv}     the server's own addresses and name
    ${now}                                  ms since 1970, when the step is sent
    ${name:place}                           the physical offset in a saved offsetMsgId
    ${name}                                 the value that an earlier step of the scenario saved under that name
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

    `save` names parts of the answer for later steps: paths such as `ext.msgId` or `body.0.properties.POP_CK`. `until`
    is a condition on the answer: the request is repeated until it holds, with a deadline. `line` is the connection:
    servers identify clients by theirs. `names_only`: the body's values are measurements or settings of the machine, so
    only their names are compared. `patience_s` is the time limit for an answer or for `until`.
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
    """Steps in order, under the name that the page of differences uses."""

    name: str
    steps: tuple[Step, ...]
