"""Which rows a query or a batch of a stream reads, and where they are stored: no Spark, no Arrow.

In the order of a query's life:

options            the options of `format("neve")`
rows               sets of offsets
wanted             filters on rows, as far as objects and row groups can apply them
journals           the journals of an archive, and the rows that each entry added
queues             queues, and what brokers report of them
slices             row groups that contain rows, divided into tasks
planner            the queues of a query, and the plan of a batch
journal_positions  positions of a stream of the archive, journal_stream its planner
queue_positions    positions of a stream of archive and brokers, queue_stream its planner

A row is identified by broker, topic, queue and offset, in the archive as at the broker. A plan is made of offsets; each
row is read from an object if one contains it, otherwise from its broker, so no row is read twice.
"""
