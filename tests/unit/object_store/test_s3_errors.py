"""The text of a failed request to S3 has the code of the store, or the cause of the connection's failure."""

from __future__ import annotations

from pathlib import Path

import pytest
from obstore import exceptions as errors

from infra.objects import probe
from infra.objects.s3 import _translate
from infra.objects.store import AccessDenied, Pace, PutOutcome, StoreUnavailable, unpaced
from tests.kit.store.memory_store import MemoryStore

_REFUSED = """The operation lacked the necessary privileges to complete for path p/k: Error performing PUT \
http://127.0.0.1:1/b/p/k in 1.2ms - Server returned non-2xx status code: 403 Forbidden: <?xml version="1.0" \
encoding="UTF-8"?>
<Error><Code>{code}</Code><Message>The message of the store</Message></Error>

Debug source:
PermissionDenied {{
"""
_BROKEN = """Generic S3 error: Error performing GET http://127.0.0.1:1/b/p/k in 84.3µs - \
HTTP error: error sending request

Debug source:
Generic {{
    {dump}
"""


@pytest.mark.parametrize("code", ["SignatureDoesNotMatch", "AccessDenied"])
def test_refusal_has_the_code_of_the_store(code: str) -> None:
    found = _translate(errors.PermissionDeniedError(_REFUSED.format(code=code)), "k")
    assert isinstance(found, AccessDenied)
    assert str(found).endswith(f"403 Forbidden: {code}: The message of the store")
    assert "<?xml" not in str(found)


@pytest.mark.parametrize(
    ("dump", "cause"),
    [('  message: "Connection refused",', "Connection refused"), ("source: TimedOut,", "timed out")],
)
def test_failed_request_has_its_cause(dump: str, cause: str) -> None:
    found = _translate(errors.GenericError(_BROKEN.format(dump=dump)), "k")
    assert isinstance(found, StoreUnavailable)
    assert str(found).endswith(f"error sending request: {cause}")


@pytest.mark.parametrize(
    ("code", "text"), [("SignatureDoesNotMatch", "the credentials are wrong"), ("AccessDenied", "grant access")]
)
def test_probe_tells_wrong_credentials_from_a_missing_right(code: str, text: str) -> None:
    class Refusing(MemoryStore):
        def put(self, key: str, data: bytes | Path, *, if_absent: bool = False, pace: Pace = unpaced) -> PutOutcome:
            raise AccessDenied(f"k: 403 Forbidden: {code}: The message of the store")

    with pytest.raises(AccessDenied, match=text):
        probe.probe(Refusing())
