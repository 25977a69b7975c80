"""How much of the machine a process asks for, beside others that want it, too; by `infra.process_priority`.

    normal  as any process
    low     nice 19, without waking before others: a seventieth of a processor that somebody else wants, a thread
    idle    SCHED_IDLE: what nobody else wants; who wakes and is normal runs at once

None asks for more than the broker that starts it has. Names alone: rules are pure.
"""

NORMAL, LOW, IDLE = "normal", "low", "idle"
