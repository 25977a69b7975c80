"""The machine: clock, disk, object stores, sockets, config, metrics. Knows no topic."""
