"""The configuration keys of TLS, users and policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from infra.config.properties import key


@dataclass
class SecurityConfig:
    """TLS, users and policies: the same keys for all servers. No request returns a secret."""

    #: RocketMQ's configuration classes whose keys this server accepts.
    rocketmq_classes: ClassVar[tuple[str, ...]] = ("AuthConfig",)

    tls_server_mode: str = key("permissive", choices=("disabled", "permissive", "enforcing"), alias="tls.server.mode")
    tls_cert_path: str = key("", alias="tls.server.certPath")
    tls_key_path: str = key("", alias="tls.server.keyPath")
    tls_enable: bool = key(False, alias="tls.enable")  # for connections to other servers
    tls_trust_cert_path: str = key("", alias="tls.client.trustCertPath")
    authentication_enabled: bool = key(False)
    authorization_enabled: bool = key(False)
    auth_config_path: str = key("")
    init_authentication_user: str = key("", secret=True)
    inner_client_authentication_credentials: str = key("", secret=True)
