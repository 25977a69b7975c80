"""Configuration of a member of a broker set."""

from __future__ import annotations

import msgspec

from broker.ha.confirm import ConfirmRules


class MemberRules(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a member. Times are in seconds."""

    confirm: ConfirmRules
    acknowledges_from_memory: bool = True  # ASYNC_FLUSH: after a crash this member may lack bytes that it acknowledged
    is_alone: bool = False  # the set has no other member
    set_exists: bool = False  # the set had a master: a controller that knows of none has lost its state
    heartbeat_every: float = 1.0
    ask_again_after: float = 1.0  # without an answer
    # 1004, if there is no other reason for one: an async master has to hear from another process in `isolated_after`
    poll_every: float = 1.0
    # 1003, in normal operation: a delayed one of a former life may have arrived after this life's
    register_every: float = 5.0
    save_confirm_every: float = 1.0
    switchover_within: float = 1.0
