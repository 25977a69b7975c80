"""First phase: configuration, machine, address, and the state of the process."""

from __future__ import annotations

from dataclasses import dataclass, field

from broker.archiving.environment import Environment
from broker.config import BrokerConfig
from broker.intake.disk_mark import used_ratio
from broker.life import BrokerLife
from broker.machine import Machine
from broker.role import BrokerRole
from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.loop.supervisor import Faults, Supervisor
from infra.loop.threads import Threads
from infra.process.descriptors import DescriptorBudget, budget, mappings_limit
from infra.process.startup import free_port, local_address, open_files_limit


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Environment of all parts of a broker."""

    config: BrokerConfig
    machine: Machine
    #: Address for clients.
    address: tuple[str, int]
    #: Port for slaves as configured; 0 takes any free port.
    ha_port: int
    descriptors: DescriptorBudget
    life: BrokerLife
    role: BrokerRole = field(default_factory=BrokerRole)
    faults: Faults = field(default_factory=Faults)
    supervisor: Supervisor = field(default_factory=lambda: Supervisor("broker"))

    @property
    def clock(self) -> Clock:
        return self.machine.clock

    @property
    def disk(self) -> Disk:
        return self.machine.disk

    @property
    def environment(self) -> Environment:
        return self.machine.environment

    @property
    def threads(self) -> Threads:
        return self.machine.environment.threads

    def used_ratio(self) -> float:
        """Return the used share of the data directory's disk."""
        return used_ratio(self.disk, self.config.root)

    def is_crowded(self) -> bool:
        """Return whether that share is above `diskMaxUsedSpaceRatio`."""
        return self.used_ratio() > self.config.disk_max_used_space_ratio / 100

    @property
    def exports(self) -> bool:
        """Whether RocketMQ's metrics are exported on a port of their own."""
        return self.config.metrics_exporter_type == "PROM"


def make_runtime(config: BrokerConfig, machine: Machine) -> Runtime:
    """Create the environment, and choose the port if `listenPort` is 0: the log's records and ids contain it."""
    ha_port = config.ha_port  # before `listenPort` is known: it depends on it
    config.listen_port = config.listen_port or free_port(config.bind_address)
    return Runtime(
        config=config,
        machine=machine,
        address=(_own_host(config), config.listen_port),
        ha_port=ha_port,
        descriptors=budget(open_files_limit(), mappings_limit()),
        life=BrokerLife(machine.clock),
    )


def _own_host(config: BrokerConfig) -> str:
    peer = config.name_servers[0].rpartition(":")[0] if config.name_servers else None
    return config.broker_ip1 or local_address(peer)
