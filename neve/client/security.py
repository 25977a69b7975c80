"""Who signs the requests, and what connections trust: from files and the environment, for whoever is told of them.

A file of credentials is the one that `mqadmin` reads, conf/tools.yml: lines `accessKey: …` and `secretKey: …`.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

from neve.errors import ClientError

ACCESS_KEY_VARIABLE = "NEVE_ACCESS_KEY"
SECRET_KEY_VARIABLE = "NEVE_SECRET_KEY"


def credentials_in_file(file: Path) -> tuple[str, str]:
    """(access key, secret key); other lines are left alone.

    Raises:
        ClientError: one is missing. The message names the file, never what is in it.
        OSError: it can't be read.
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
    """Of NEVE_ACCESS_KEY and NEVE_SECRET_KEY; None for neither.

    Raises:
        ClientError: one without the other.
    """
    access_key, secret_key = environment.get(ACCESS_KEY_VARIABLE), environment.get(SECRET_KEY_VARIABLE)
    if bool(access_key) != bool(secret_key):
        raise ClientError(f"{ACCESS_KEY_VARIABLE} and {SECRET_KEY_VARIABLE} go together")
    return (access_key, secret_key) if access_key and secret_key else None


def tls_context(trusted: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    """PEM files: whom to trust instead of the system's authorities, and who this end is.

    Raises:
        ClientError: certificate or key without the other, or a file that is none of that kind.
        OSError: one can't be read.
    """
    if (certificate is None) != (key is None):
        raise ClientError("a certificate and its key go together")
    try:
        context = ssl.create_default_context(cafile=None if trusted is None else str(trusted))
        if certificate is not None and key is not None:
            context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ClientError(f"a file for TLS is no PEM of that kind: {error}") from error
    return context
