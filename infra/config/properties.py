"""RocketMQ property files with types and ranges: an invalid line is an error, never a silent default.

A field `listen_port` of a configuration class is the key `listenPort`; its default defines the type, its metadata the
range. A key of RocketMQ that neve does not support is a warning with the reason, or an error if ignoring it would break
a guarantee.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

from infra.config import rocketmq_keys
from neve.units import DAY_MS, DURATION_MS, HOUR_MS, MINUTE_MS, SECOND_MS

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SECOND, MINUTE, HOUR, DAY = SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS

_SIZES = {"": 1, "k": KIB, "kib": KIB, "m": MIB, "mib": MIB, "g": GIB, "gib": GIB}
_TIMES = {"": 1, **DURATION_MS}
_NUMBER_AND_UNIT = re.compile(r"(-?\d+)\s*([A-Za-z]*)")
# The syntax of java.util.Properties: the end of a key, and the escapes
_KEY_AND_VALUE = re.compile(r"((?:\\.|[^\\=:\s])+)(?:\s*[=:]\s*|\s+)(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_ESCAPED = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_ALIKE = 0.8  # similarity from which a name counts as a misspelling


class ConfigError(Exception):
    """Invalid keys or values; each of `faults` names the line and the allowed values."""

    def __init__(self, *faults: str) -> None:
        self.faults = faults
        head = "" if len(faults) == 1 else f"{len(faults)} faults in the configuration:\n  "
        super().__init__(head + "\n  ".join(faults))


def key(default: Any, *, low: int | None = None, high: int | None = None, choices: tuple[str, ...] = (),
        unit: str = "", live: bool = False, name: str = "", alias: str = "", secret: bool = False) -> Any:  # fmt: skip
    """Return a field of a configuration class; a `live` key may be changed on a running broker (request 25)."""
    metadata = {"low": low, "high": high, "choices": choices, "unit": unit, "live": live, "name": name}
    metadata |= {"alias": alias, "secret": secret}
    return field(default=default, metadata=metadata)


C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class LoadedConfig(Generic[C]):
    """A configuration, and warnings about keys without effect."""

    config: C
    warnings: Sequence[str]


def load(cls: type[C], path: Path | None, overrides: Iterable[str] = ()) -> C:
    """As `read`, without the warnings."""
    return read(cls, path, overrides).config


def read(cls: type[C], path: Path | None, overrides: Iterable[str] = ()) -> LoadedConfig[C]:
    """Return the defaults, overridden by the file and then by `key=value` overrides.

    Raises:
        ConfigError: with all invalid lines.
    """
    lines = _lines(path, overrides)
    given = {_own_name(_fields(cls), line.name): line.raw for line in lines}
    values: dict[str, Any] = {}
    faults: list[str] = []
    warnings: list[str] = []
    for line in lines:
        try:
            values.update(_checked(cls, line, given, warnings))
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(*faults)
    return LoadedConfig(cls(**values), warnings)


class KeyVerdict(NamedTuple):
    """The effect of a line, or of a key without one (`where` is empty). Contains no secret value."""

    where: str
    name: str
    state: str
    text: str


#: The states of a verdict.
IS_HONOURED, IS_IGNORED, IS_FAULT, IS_ABSENT = "honoured", "ignored", "fault", "absent"


def verdicts(cls: type[Any], path: Path | None, overrides: Iterable[str] = ()) -> list[KeyVerdict]:
    """Return the verdict of each line in order, then of absent keys whose default differs from RocketMQ's.

    Raises:
        ConfigError: the file cannot be read.
    """
    lines, known = _lines(path, overrides), _fields(cls)
    given = {_own_name(known, line.name): line.raw for line in lines}
    found = [_verdict(cls, line, given) for line in lines]
    for name, other in rocketmq_keys.OTHER_DEFAULTS.get(cls.__name__, {}).items():
        if name not in given:
            own = known[name].default
            here = str(own).lower() if isinstance(own, bool) else own
            text = f"not given: {here} here, {other.theirs or 'nothing'} in RocketMQ: {other.why}"
            found.append(KeyVerdict("", name, IS_ABSENT, text))
    return found


def _verdict(cls: type[Any], line: "_Line", given: Mapping[str, str]) -> KeyVerdict:
    vain: list[str] = []
    try:
        values = _checked(cls, line, given, vain)
    except ConfigError as error:
        return KeyVerdict(line.where, line.name, IS_FAULT, str(error).removeprefix(f"{line.where}: "))
    if not values:
        text = vain[0].removeprefix(f"{line.where}: {line.name} ") if vain else "RocketMQ's default: nothing changes"
        return KeyVerdict(line.where, line.name, IS_IGNORED if vain else IS_HONOURED, text)
    known = _fields(cls)
    name = _own_name(known, line.name)
    text = "honoured" if name == line.name else f"honoured as {name}"
    if name not in rocketmq_keys.keys(getattr(cls, "rocketmq_classes", ())):
        text = "a key of neve's own"
    return KeyVerdict(line.where, line.name, IS_HONOURED, text)


class _Line(NamedTuple):
    """A line of a file or an option; if `name` is empty, `raw` is an invalid line as a whole."""

    where: str
    name: str
    raw: str


def _lines(path: Path | None, overrides: Iterable[str]) -> list[_Line]:
    lines: list[_Line] = []
    if path is not None:
        try:
            text = path.read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from error
        lines += (_Line(*line) for line in _properties(text, str(path)))
    for item in overrides:
        name, separator, raw = item.partition("=")
        is_pair = bool(separator and name.strip())
        lines.append(_Line(f"--set {name.strip()}", name.strip(), raw.strip()) if is_pair else _Line("--set", "", item))
    return lines


def parse_properties(text: str, source: str) -> Iterable[tuple[str, str, str]]:
    """Yield (where, key, value) of each line of a Java properties text, without comments and blank lines."""
    for where, name, raw in _properties(text, source):
        if not name:
            raise ConfigError(f"{where}: {raw!r} is not key=value")
        yield where, name, raw


def _properties(text: str, source: str) -> Iterable[tuple[str, str, str]]:
    """Parse like `java.util.Properties`; the key of an invalid line is empty."""
    pending, first_line = "", 0
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        stripped = line.lstrip(" \t\f")
        if not pending and (not stripped.strip() or stripped[0] in "#!"):
            continue
        first_line = first_line if pending else number
        pending += stripped
        if (len(pending) - len(pending.rstrip("\\"))) % 2:
            pending = pending[:-1] or " "
            continue
        found = _KEY_AND_VALUE.fullmatch(pending.strip())
        where = f"{source}:{first_line}"
        yield (where, _unescaped(found[1]), _unescaped(found[2])) if found else (where, "", pending.strip())
        pending = ""
    if pending.strip():
        yield f"{source}:{first_line}", "", pending.strip()


def _unescaped(text: str) -> str:
    def meant(found: "re.Match[str]") -> str:
        code = found[1]
        return chr(int(code[1:], 16)) if len(code) == 5 else _ESCAPED.get(code, code)

    return _ESCAPE.sub(meant, text) if "\\" in text else text


def update_live(config: object, changes: Mapping[str, str]) -> None:
    """Change a running configuration: all of the changes, or none if one is invalid."""
    values: dict[str, Any] = {}
    known = _fields(type(config))
    for given, raw in changes.items():
        name = _own_name(known, given)
        if name in known and not known[name].metadata.get("live", False):
            raise ConfigError(f"{name}: cannot be changed on a running broker")
        foreign = _foreign(type(config), name)
        if foreign is not None and foreign.reason in rocketmq_keys.REASONS:
            raise ConfigError(f"{name} has no effect: {rocketmq_keys.REASONS[foreign.reason]}")
        values.update(_checked(type(config), _Line("update", name, raw), changes, []))
    for attribute, value in values.items():
        setattr(config, attribute, value)


def live_keys(config: object) -> list[str]:
    return [name for name, item in _fields(type(config)).items() if item.metadata.get("live", False)]


def to_properties(config: object) -> str:
    """Return the text of request 26: all keys with their current values, but for secrets."""
    secret = {name for name, item in _fields(type(config)).items() if item.metadata.get("secret", False)}
    texts = sorted((name, text) for name, text in value_texts(config).items() if name not in secret)
    return "\n".join(f"{name}={text}".replace("\\", "\\\\") for name, text in texts) + "\n"


def value_texts(config: object) -> dict[str, str]:
    """Return the current values by key, in the syntax of a file."""
    values = ((name, getattr(config, item.name)) for name, item in _fields(type(config)).items())
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values}


def wire_name(attribute: str) -> str:
    head, *rest = attribute.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _fields(cls: type[Any]) -> dict[str, "dataclasses.Field[Any]"]:
    return {item.metadata.get("name") or wire_name(item.name): item for item in dataclasses.fields(cls)}


def _own_name(known: Mapping[str, "dataclasses.Field[Any]"], name: str) -> str:
    """Return the canonical name: RocketMQ has dotted names (system properties) and old spellings for some keys."""
    name = rocketmq_keys.ALIASES.get(name, name)
    return next((own for own, item in known.items() if name and item.metadata.get("alias") == name), name)


def _foreign(cls: type[Any], name: str) -> rocketmq_keys.Key | None:
    """Return RocketMQ's key of that name."""
    return rocketmq_keys.keys(getattr(cls, "rocketmq_classes", ())).get(name)


def _checked(cls: type[Any], line: _Line, given: Mapping[str, str], warnings: list[str]) -> dict[str, Any]:
    """Return the attribute that a line sets; nothing, and perhaps a warning, for a key without effect."""
    known = _fields(cls)
    where, raw = line.where, line.raw
    if not line.name:
        raise ConfigError(f"{where}: {raw!r} is not key=value")
    name = _own_name(known, line.name)
    why = rocketmq_keys.refusal(name, raw, given)
    foreign = _foreign(cls, name)
    if foreign is not None and why is not None:
        raise ConfigError(f"{where}: {line.name}={raw} is refused: {why}")
    if name not in known:
        if foreign is None:
            raise ConfigError(f"{where}: unknown key {line.name}{_near(cls, line.name)}")
        if (vain := rocketmq_keys.warning(foreign, raw)) is not None:
            warnings.append(f"{where}: {line.name} has no effect: {vain}")
        return {}
    item = known[name]
    kind = get_type_hints(cls)[item.name]
    try:
        value = _parse(kind, raw, item.metadata)
    except ValueError as error:
        shown = "…" if item.metadata.get("secret", False) else raw
        raise ConfigError(f"{where}: {name}={shown}: {error}") from error
    return {item.name: value}


def _near(cls: type[Any], name: str) -> str:
    names = {*_fields(cls), *rocketmq_keys.keys(getattr(cls, "rocketmq_classes", ()))}
    by_lower = {candidate.lower(): candidate for candidate in names}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=_ALIKE)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""


def time_ms(raw: str, low: int, high: int) -> int:
    """Parse a duration in the syntax of a key into milliseconds. Raises ValueError."""
    return int(_parse(int, raw, {"unit": "time", "low": low, "high": high}))


def _allowed(low: int | None, high: int | None, unit: str) -> str:
    """Describe the allowed values of a whole number, with its unit."""
    bounds = "a whole number" if low is None else f"a whole number from {low} to {high}"
    if unit == "time":
        ends = "" if low is None or high is None else f" ({_time_text(low)} to {_time_text(high)})"
        return f"allowed: {bounds} ms{ends}, or with a unit, as 500ms, 30s, 10m, 2h, 7d"
    if unit == "size":
        return f"allowed: {bounds} bytes, or with a unit, as 64k, 8m, 1g"
    return f"allowed: {bounds}"


def _time_text(ms: int) -> str:
    """Return the shortest exact notation."""
    for unit in ("d", "h", "m", "s"):
        if ms and ms % _TIMES[unit] == 0:
            return f"{ms // _TIMES[unit]}{unit}"
    return f"{ms}ms"


def _parse(kind: Any, raw: str, rules: Mapping[str, Any]) -> Any:
    if kind is bool:
        if raw.lower() not in ("true", "false"):
            raise ValueError("allowed: true, false")
        return raw.lower() == "true"
    if kind is not int:
        choices = rules.get("choices") or ()
        if choices and raw not in choices:
            raise ValueError(f"allowed: {', '.join(choices)}")
        return raw
    low, high = rules.get("low"), rules.get("high")
    allowed = _allowed(low, high, rules.get("unit", ""))
    match = _NUMBER_AND_UNIT.fullmatch(raw)
    units = {"size": _SIZES, "time": _TIMES}.get(rules.get("unit", ""), {"": 1})
    if match is None or match[2].lower() not in units:
        raise ValueError(allowed)
    value = int(match[1]) * units[match[2].lower()]
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(allowed)
    return value
