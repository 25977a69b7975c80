"""The priorities that `infra.process.processor` gives a process. Names only: pure rules may import them.

    normal  the default of the system
    low     SCHED_BATCH at nice 19: each thread gets a seventieth of a processor that a normal thread wants
    idle    SCHED_IDLE: unused processor time; a normal thread that wakes preempts it

No worker gets more than the broker that starts it.
"""

NORMAL, LOW, IDLE = "normal", "low", "idle"
