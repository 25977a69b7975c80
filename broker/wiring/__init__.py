"""Composition of a broker, one module for each phase of its construction.

Each phase creates its parts from the parts of earlier phases and returns them as a frozen dataclass.
No phase changes the parts of an earlier one.

    runtime         configuration, machine, address, and the state of the process
    storage         the log, its flusher and its acknowledgement by replicas
    tables          topics, groups, committed offsets, request modes, users
    messages        waiting and popped messages, and the metadata log
    archive         the archive's local side, and the parts that follow a master
    service         the parts behind the requests of clients
    replication     the membership in a broker set, and the registration at the name servers
    server          the request handlers (`requests`) and the ports

`parts` holds all phases before the ports. `recovery`, `pages` and `tasks` are steps of a start. `opened_archive` and
`member_events` connect parts to others that exist later: the archive, and the membership.
"""
