"""Choice of the register by configuration: a file of this controller, or etcd shared with others."""

from __future__ import annotations

from controller.controller_config import ControllerConfig
from controller.other_controllers import NO_OTHER_CONTROLLERS, OtherControllers
from controller.register import FileRegister, Register
from infra.disk.filesystem import Disk
from infra.loop.threads import SYSTEM_THREADS


def register_of(config: ControllerConfig, disk: Disk) -> tuple[Register, OtherControllers]:
    """Return the register, not opened yet, and its other controllers. Raises StartupError for invalid settings."""
    if not config.register_url:
        return FileRegister(config.register_path, disk, SYSTEM_THREADS), NO_OTHER_CONTROLLERS
    from controller.etcd_register import etcd_register  # lazily: only configurations with etcd load its client

    return etcd_register(config)
