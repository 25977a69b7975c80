"""Which rows a query or a batch of a stream reads, and from which objects: no Spark, no Arrow.

In the order of a query's life: `options` (what was asked for), `journals` (what the archive's journals say),
`rows` (sets of offsets), `positions` (where a stream stands, as arithmetic), `slices` (which row groups hold them, in
tasks), `planner` (all of it for one query).
"""
