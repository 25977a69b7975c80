"""The keys that say who may: TLS, users, policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from infra.config.properties import key


@dataclass
class SecurityConfig:
    """TLS, users and policies: the same keys for brokers and name servers. Secrets are never shown (request 26)."""

    #: The classes of RocketMQ whose keys a file of this server may have.
    rocketmq_classes: ClassVar[tuple[str, ...]] = ("AuthConfig",)

    tls_server_mode: str = key("permissive", choices=("disabled", "permissive", "enforcing"), alias="tls.server.mode")
    tls_cert_path: str = key("", alias="tls.server.certPath")
    tls_key_path: str = key("", alias="tls.server.keyPath")
    tls_enable: bool = key(False, alias="tls.enable")  # of what this server asks another
    tls_trust_cert_path: str = key("", alias="tls.client.trustCertPath")
    authentication_enabled: bool = key(False)
    authorization_enabled: bool = key(False)
    auth_config_path: str = key("")
    init_authentication_user: str = key("", secret=True)
    inner_client_authentication_credentials: str = key("", secret=True)
