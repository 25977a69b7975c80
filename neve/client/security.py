"""Reads credentials and TLS certificates from files and the environment.

A file of credentials has the format of `mqadmin`'s conf/tools.yml: lines `accessKey: …` and `secretKey: …`.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

from neve.errors import ClientError

ACCESS_KEY_VARIABLE = "NEVE_ACCESS_KEY"
SECRET_KEY_VARIABLE = "NEVE_SECRET_KEY"


def credentials_in_file(file: Path) -> tuple[str, str]:
    """Return the access key and the secret key of a file; other lines are ignored.

    Raises:
        ClientError: a key is missing. The error names the file, never its content.
        OSError: the file is not readable.
    """
    found: dict[str, str] = {}
    for line in file.read_text().splitlines():
        name, separator, value = line.partition(":")
        if separator and not name.lstrip().startswith("#"):
            found[name.strip()] = value.strip().strip("'\"")
    missing = [name for name in ("accessKey", "secretKey") if not found.get(name)]
    if missing:
        raise ClientError(f"{file} has no {' and no '.join(missing)}")
    return found["accessKey"], found["secretKey"]


def credentials_in_environment(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the values of NEVE_ACCESS_KEY and NEVE_SECRET_KEY, or None if both are unset.

    Raises:
        ClientError: one of them is unset.
    """
    access_key, secret_key = environment.get(ACCESS_KEY_VARIABLE), environment.get(SECRET_KEY_VARIABLE)
    if bool(access_key) != bool(secret_key):
        raise ClientError(f"{ACCESS_KEY_VARIABLE} and {SECRET_KEY_VARIABLE} must both be set")
    return (access_key, secret_key) if access_key and secret_key else None


def tls_context(trusted: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    """Return a TLS context.

    Args:
        trusted: a PEM file of certificate authorities, instead of those of the system.
        certificate: a PEM file with the certificate of the client.
        key: a PEM file with its key.

    Raises:
        ClientError: only one of certificate and key is given, or a file is no such PEM file.
        OSError: a file is not readable.
    """
    if (certificate is None) != (key is None):
        raise ClientError("a certificate needs its key, and a key its certificate")
    try:
        context = ssl.create_default_context(cafile=None if trusted is None else str(trusted))
        if certificate is not None and key is not None:
            context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ClientError(f"invalid PEM file for TLS: {error}") from error
    return context
