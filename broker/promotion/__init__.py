"""A copy of an Apache master's log becomes a master's own: what waits in RocketMQ's form goes on in neve's."""
