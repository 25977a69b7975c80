"""Archive and brokers as one table: what `format("neve")` reads with the option `namesrv`.

Rows are named by queue and offset, in both tiers by the same ones. So which rows are read is settled in offsets, when a
query or a batch of a stream is planned, and where they are is looked up: in an object if one has them, else at their
broker, from the offset on at which the archive ends. A row has one name, so none is there twice, whichever tier has it
by the time it is read.

queues       queues, their bounds, and what is pulled of one
positions    where a stream stands: an offset of each queue
brokers      what brokers are asked when something is planned
planner      what a query, or a batch of a stream, reads
hot_rows     rows pulled from brokers, in a task
"""
