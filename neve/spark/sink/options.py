"""The options of a write. `topic` is as in Spark's Kafka sink; the others are those of a client.

The driver reads the credentials and sends them with the tasks. The files of TLS are read where a task runs, and must
exist on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from neve.client.security import credentials_in_environment, credentials_in_file, tls_context
from neve.client.validators import check_topic
from neve.errors import ClientError
from neve.spark.planning.options import BadOption

if TYPE_CHECKING:
    import ssl

_SECURITY = ("credentials", "accessKey", "secretKey", "tls", "tlsCa", "tlsCert", "tlsKey")
_BATCHES = ("batchMessages", "batchBytes", "inFlight", "patience", "maxMessageSize")
_KNOWN = ("namesrv", "topic", "path", "reservedProperties", *_SECURITY, *_BATCHES)
_OF_STREAMS = ("checkpointLocation", "queryName")  # Spark passes its own options, too
_INSTEAD = {
    "store": "messages are written to brokers, which archive them: use the option namesrv",
    "kafka.bootstrap.servers": "use the option namesrv",
    "includeheaders": "use the column properties",
    "exactlyonce": "rows are written at least once. Half messages that a commit decides could not be shown to survive"
    " kills of drivers, tasks and brokers. Repeated messages have the same property NEVE_SINK:"
    " neve.spark.without_repeats(frame) removes them",
}
_REFUSE, _DROP = "refuse", "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """The options of a write. If `topic` is None, the column `topic` has the topic of each row."""

    namesrv: str
    topic: str | None = None
    credentials: tuple[str, str] | None = field(default=None, repr=False)
    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    drops_reserved: bool = False
    batch_messages: int = 200
    batch_bytes: int = 256 << 10
    in_flight: int = 8
    patience_s: float = 30.0
    message_max: int = 4 << 20

    def tls_here(self) -> ssl.SSLContext | bool:
        """Return the TLS context of this machine's files, or whether TLS is used. Raises ClientError, OSError."""
        if not self.tls:
            return False
        return tls_context(
            *(None if file is None else Path(file) for file in (self.tls_ca, self.tls_cert, self.tls_key))
        )


def options_of_sink(options: Mapping[str, str], environment: Mapping[str, str]) -> SinkOptions:
    """Parse the options of a write. Raises BadOption."""
    given = {name.lower(): value for name, value in options.items()}
    known = {name.lower() for name in (*_KNOWN, *_OF_STREAMS)}
    for name in sorted(set(given) - known):
        if name == "exactlyonce" and given[name].lower() == "false":
            continue
        raise BadOption(f"option {name}: {_INSTEAD.get(name, 'unknown; options are ' + ', '.join(sorted(_KNOWN)))}")
    if "namesrv" not in given:
        raise BadOption("option namesrv is missing: the name servers of the cluster, host:port, several joined by ;")
    return SinkOptions(
        namesrv=given["namesrv"],
        topic=_topic(given),
        credentials=_credentials(given, environment),
        tls=_has_tls(given),
        tls_ca=given.get("tlsca"),
        tls_cert=given.get("tlscert"),
        tls_key=given.get("tlskey"),
        drops_reserved=_choice("reservedProperties", given.get("reservedproperties", _REFUSE), (_REFUSE, _DROP))
        == _DROP,
        batch_messages=_number("batchMessages", given.get("batchmessages", "200"), 10_000),
        batch_bytes=_number("batchBytes", given.get("batchbytes", str(256 << 10)), 64 << 20),
        in_flight=_number("inFlight", given.get("inflight", "8"), 1_000),
        patience_s=_number("patience", given.get("patience", "30"), 86_400),
        message_max=_number("maxMessageSize", given.get("maxmessagesize", str(4 << 20)), 64 << 20),
    )


def _topic(given: Mapping[str, str]) -> str | None:
    if "topic" in given and "path" in given:
        raise BadOption("the option topic and the path of save() or start() exclude each other")
    topic = given.get("topic", given.get("path"))
    if topic is None:
        return None
    if "," in topic:
        raise BadOption(f"option topic has several topics, {topic!r}: use the column topic")
    try:
        check_topic(topic)
    except ClientError as error:
        raise BadOption(f"option topic: {error.remark}") from error
    return topic


def _credentials(given: Mapping[str, str], environment: Mapping[str, str]) -> tuple[str, str] | None:
    access_key, secret_key = given.get("accesskey"), given.get("secretkey")
    if bool(access_key) != bool(secret_key):
        raise BadOption("options accessKey and secretKey require each other")
    if access_key and secret_key:
        if "credentials" in given:
            raise BadOption("options credentials and accessKey exclude each other")
        return access_key, secret_key
    try:
        if "credentials" in given:
            return credentials_in_file(Path(given["credentials"]))
        return credentials_in_environment(environment)
    except (ClientError, OSError) as error:
        raise BadOption(f"option credentials: {error}") from error


def _has_tls(given: Mapping[str, str]) -> bool:
    if ("tlscert" in given) != ("tlskey" in given):
        raise BadOption("options tlsCert and tlsKey require each other")
    files = [name for name in ("tlsca", "tlscert") if name in given]
    return _choice("tls", given.get("tls", "true" if files else "false"), ("true", "false")) == "true"


def _choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value.lower() not in choices:
        raise BadOption(f"option {name} must be {' or '.join(choices)}, got {value!r}")
    return value.lower()


def _number(name: str, value: str, most: int) -> int:
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= most:
        raise BadOption(f"option {name} must be a number from 1 to {most}, got {value!r}")
    return int(value)
