"""The signature of a request: Base64(HMAC-SHA1(secret, values of all header fields in the order of their keys, body)).

RocketMQ's clients since 4.4 sign so. Code, opaque and key names are not covered: credentials belong on TLS.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping

ACCESS_KEY = "AccessKey"
SIGNATURE = "Signature"
# Clients up to 4.9.3 add this field after they have signed.
_LATE_FIELD = "_UNIQUE_KEY_QUERY"


def sign(secret: str, ext: Mapping[str, str], body: bytes = b"") -> str:
    """The signature of these fields (a `Signature` among them is left out) and this body."""
    fields = "".join(ext[key] for key in sorted(ext) if key != SIGNATURE)
    digest = hmac.new(secret.encode(), fields.encode("utf-8", "surrogatepass"), hashlib.sha1)
    digest.update(body)
    return base64.b64encode(digest.digest()).decode()


def signed(access_key: str, secret: str, ext: Mapping[str, str], body: bytes = b"") -> dict[str, str]:
    """The fields with `AccessKey` and `Signature` added."""
    fields = {**ext, ACCESS_KEY: access_key}
    fields[SIGNATURE] = sign(secret, fields, body)
    return fields


def verify(secret: str, ext: Mapping[str, str], body: bytes = b"") -> bool:
    """Whether the `Signature` among the fields is right; takes the same time for every wrong one."""
    given = ext.get(SIGNATURE, "").encode("utf-8", "surrogatepass")
    if hmac.compare_digest(sign(secret, ext, body).encode(), given):
        return True
    if _LATE_FIELD not in ext:
        return False
    rest = {key: value for key, value in ext.items() if key != _LATE_FIELD}
    return hmac.compare_digest(sign(secret, rest, body).encode(), given)
