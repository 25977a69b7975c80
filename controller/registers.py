"""Which register a configuration names, a file of this controller or etcd, and who else has it."""

from __future__ import annotations

from controller.controller_config import ControllerConfig
from controller.other_controllers import NO_OTHER_CONTROLLERS, OtherControllers
from controller.register import FileRegister, Register
from infra.disk.filesystem import Disk
from infra.loop.threads import SYSTEM_THREADS


def register_of(config: ControllerConfig, disk: Disk) -> tuple[Register, OtherControllers]:
    """Not opened yet. StartupError for what can't be one."""
    if not config.register_url:
        return FileRegister(config.register_path, disk, SYSTEM_THREADS), NO_OTHER_CONTROLLERS
    from controller.etcd_register import etcd_register  # its client is loaded by who has an etcd

    return etcd_register(config)
