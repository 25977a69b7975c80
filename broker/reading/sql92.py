"""SQL92 subscriptions: text → tokens → expression tree → closures over a message's properties.

Source: RocketMQ 5.3.3, module `filter` (SelectorParser.jj, ComparisonExpression, UnaryExpression, LogicExpression).
Grammar, precedence and values are RocketMQ's, with its peculiarities, because a migrated consumer must receive the
messages that it received before. Operators, loosest first:

    OR
    AND
    = <> !=, IS [NOT] NULL
    > >= < <=, [NOT] BETWEEN, [NOT] IN, [NOT] CONTAINS, STARTSWITH, ENDSWITH
    NOT - +

Three values as in SQL: True, False and None (unknown). A message is selected only if the whole is True.

If a property does not have the form of the value that it is compared with, RocketMQ raises an exception and skips the
message. Here only that comparison is unknown, and the rest of the expression decides. Every message that RocketMQ
selects is selected. `docs/reference/compatibility.md` lists all differences.
"""

import functools
import itertools
import math
import operator
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

TEXT_LIMIT_BYTES: Final = 256 << 10
#: Limit on operators and operands. The values of an IN count as one operand, because an IN is one look-up in a set.
NODE_LIMIT: Final = 4096
#: Limit on the tokens of an expression. A list of two or more strings is one token.
TOKEN_LIMIT: Final = 16_384
#: Limit on nested operators, because evaluation and compilation recurse. Brackets and chains of AND or OR do not count.
DEPTH_LIMIT: Final = 200
#: Limit on the total text of cached filters. The values of an IN need ten times the size of their text.
CACHE_LIMIT_BYTES: Final = 2 << 20

Properties = Mapping[str, str]
Evaluate = Callable[[Properties], Any]


class SqlError(ValueError):
    """The text is not an expression of this grammar, or it is too large."""


# ---- tokens

# RocketMQ's line comment ends with a newline. The last line has its own pattern, because searching a newline there
# would cost a scan for each minus sign.
_SKIPPED = re.compile(r"(?:[ \t\n\r\f]|--[^\n\r]*[\n\r]|/\*.*?\*/)+", re.DOTALL)
_SKIPPED_IN_LAST_LINE = re.compile(r"(?:[ \t\n\r\f]|/\*.*?\*/)+", re.DOTALL)
_TOKEN = re.compile(
    r"(?P<text>'(?:[^']|'')*')"
    # The values of an IN as one token: there may be thousands.
    r"|(?P<list>\([ \t\n\r\f]*+'(?:[^']|'')*+'(?:[ \t\n\r\f]*+,[ \t\n\r\f]*+'(?:[^']|'')*+')++[ \t\n\r\f]*+\))"
    r"|(?P<float>[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)"
    r"|(?P<integer>0|[1-9][0-9]*[lL]?)"
    r"|(?P<word>[A-Za-z_$][\w$]*(?:\.[A-Za-z_$][\w$]*)*)"
    r"|(?P<mark><>|!=|>=|<=|[=<>(),+\-])"
)
_TEXT = re.compile(r"'((?:[^']|'')*+)'")
_KEYWORDS = frozenset(
    ["AND", "OR", "NOT", "BETWEEN", "IN", "IS", "NULL", "TRUE", "FALSE", "CONTAINS", "STARTSWITH", "ENDSWITH"]
)  # fmt: skip


class _Token(NamedTuple):
    kind: str
    value: str
    at: int


def _tokens(text: str) -> Iterator[_Token]:
    """Yield tokens lazily: text behind an unterminated line comment is not read."""
    last_newline = max(text.rfind("\n"), text.rfind("\r"))
    position = 0
    for count in itertools.count():
        skipped = _SKIPPED if position < last_newline else _SKIPPED_IN_LAST_LINE
        if (space := skipped.match(text, position)) is not None:
            position = space.end()
        if position == len(text):
            break
        if count == TOKEN_LIMIT:
            raise SqlError(f"the expression has more than {TOKEN_LIMIT} tokens")
        match = _TOKEN.match(text, position)
        if match is None:
            raise SqlError(f"{text[position : position + 10]!r} at {position} is not understood")
        kind = match.lastgroup or ""
        value = match[kind]
        if kind == "word" and value.upper() in _KEYWORDS:
            kind, value = "mark", value.upper()
        yield _Token(kind, value, position)
        position = match.end()
    while True:
        yield _Token("end", "", position)


# ---- tree


@dataclass(frozen=True, slots=True)
class Property:
    """A message's property as an operand: its text."""

    name: str


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant; None is SQL's NULL."""

    value: str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Negative:
    """`-e`: unknown (None) unless e is a number. In RocketMQ a property is a text here, so `-property` is unknown."""

    value: int | float | None


@dataclass(frozen=True, slots=True)
class Truth:
    """A property alone as a condition: false if the message has it, whatever its text, as in RocketMQ; else unknown."""

    name: str


@dataclass(frozen=True, slots=True)
class Not:
    """NOT e: unknown stays unknown."""

    inner: "Node"


@dataclass(frozen=True, slots=True)
class Logic:
    """`e AND e AND …` or `e OR e OR …`, in SQL's three values."""

    word: str
    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Compare:
    """An operand against another: `= < > <= >=`."""

    mark: str
    left: "Node"
    right: "Node"


@dataclass(frozen=True, slots=True)
class OneOf:
    """`property [NOT] IN (…)`; unknown if the message has no such property."""

    name: str
    values: tuple[str | int | float, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class IsNull:
    """`e IS NULL`; never unknown."""

    inner: "Node"


@dataclass(frozen=True, slots=True)
class TextTest:
    """`e [NOT] CONTAINS | STARTSWITH | ENDSWITH 'text'`: false if the text is empty or e is missing, negated or not."""

    word: str
    inner: "Node"
    text: str
    negated: bool


Node = Property | Literal | Negative | Truth | Not | Logic | Compare | OneOf | IsNull | TextTest

_OR, _AND, _EQUALITY, _COMPARISON, _UNARY = range(1, 6)
_LEVELS = {
    "OR": _OR, "AND": _AND, "=": _EQUALITY, "<>": _EQUALITY, "!=": _EQUALITY, "IS": _EQUALITY,
    ">": _COMPARISON, ">=": _COMPARISON, "<": _COMPARISON, "<=": _COMPARISON, "BETWEEN": _COMPARISON, "IN": _COMPARISON,
    "CONTAINS": _COMPARISON, "STARTSWITH": _COMPARISON, "ENDSWITH": _COMPARISON,
}  # fmt: skip
_AFTER_NOT = ("BETWEEN", "IN", "CONTAINS", "STARTSWITH", "ENDSWITH")
_TEXT_TESTS = ("CONTAINS", "STARTSWITH", "ENDSWITH")
_SHOWN = 40  # characters of a token in an error: a text may be very long
_BRACKET, _HALF_BETWEEN, _BETWEEN = "(", "BETWEEN …", "BETWEEN … AND …"


class _Pending(NamedTuple):
    """An operator whose last operand is not parsed yet, or an open bracket."""

    word: str
    level: int
    negated: bool = False


class _Parser:
    """Operator-precedence parser with explicit stacks, so that nested brackets cannot exhaust the recursion limit."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._token = next(self._tokens)
        self._nodes = 0
        self._pending: list[_Pending] = []
        self._operands: list[tuple[Node, int]] = []  # each with its depth

    def parse(self) -> tuple[Node, int]:
        """Return the tree, and the number of its operators and operands."""
        follows = True
        while follows:
            self._prefixes()
            follows = self._suffixes()
        self._reduce(_OR)
        if self._pending:
            raise self._unexpected(", ) was expected")
        if self._token.kind != "end" and not self._text.startswith("--", self._token.at):
            raise self._unexpected()
        return _condition(self._operands.pop()[0]), self._nodes

    def _prefixes(self) -> None:
        """Parse prefix operators and open brackets, then one operand."""
        while True:
            token = self._next()
            if token.kind != "mark" or token.value in ("TRUE", "FALSE", "NULL"):
                self._count()
                self._push(_operand(token))
                return
            if token.value == "(":
                if len(self._pending) >= NODE_LIMIT:
                    raise SqlError(f"there are more than {NODE_LIMIT} open brackets")
                self._pending.append(_Pending(_BRACKET, 0))
            elif token.value in ("NOT", "-"):
                self._count()
                self._pending.append(_Pending(token.value, _UNARY))
            elif token.value != "+":
                raise _out_of_place(token)

    def _suffixes(self) -> bool:
        """Parse everything after an operand; return whether another operand must follow."""
        while True:
            word = self._mark()
            if word == ")":
                self._reduce(_OR)
                if not self._pending:
                    return False
                self._pending.pop()
                self._next()
                continue
            if word == "AND" and self._half_between():
                self._next()
                return True
            negated = word == "NOT"
            if negated:
                token = self._next()
                word = self._mark()
                if word not in _AFTER_NOT:
                    raise _out_of_place(token)
            if word not in _LEVELS:
                return False
            self._reduce(_LEVELS[word])
            self._count()
            self._next()
            if word in _TEXT_TESTS or word in ("IS", "IN"):
                inner, depth = self._operands.pop()
                self._push(self._suffix(word, inner, negated=negated), depth + 1)
                continue
            self._pending.append(_Pending(_HALF_BETWEEN if word == "BETWEEN" else word, _LEVELS[word], negated))
            return True

    def _half_between(self) -> bool:
        """Return whether this AND belongs to a pending BETWEEN; if so, its lower bound is complete."""
        self._reduce(_UNARY)
        if not self._pending or self._pending[-1].word != _HALF_BETWEEN:
            return False
        self._pending[-1] = _Pending(_BETWEEN, _COMPARISON, self._pending[-1].negated)
        return True

    def _suffix(self, word: str, inner: Node, *, negated: bool) -> Node:
        if word == "IS":
            negated = self._take("NOT")
            self._expect("NULL")
            return Not(IsNull(inner)) if negated else IsNull(inner)
        if word == "IN":
            if not isinstance(inner, Property):
                raise self._unexpected(", IN needs a property before it")
            return OneOf(inner.name, self._list(), negated)
        token = self._next()
        if token.kind != "text":
            raise _out_of_place(token, f", {word} needs a text behind it")
        return TextTest(word, inner, _unquoted(token.value), negated)

    def _list(self) -> tuple[str | int | float, ...]:
        if self._token.kind == "list":
            return tuple(text.replace("''", "'") for text in _TEXT.findall(self._next().value))
        self._expect("(")
        values: list[str | int | float] = []
        while True:
            sign = -1 if self._take("-") else 1
            token = self._next()
            operand = _operand(token)
            value = operand.value if isinstance(operand, Literal) else None
            if value is None or isinstance(value, bool) or (sign < 0 and isinstance(value, str)):
                raise _out_of_place(token, ", IN needs texts or numbers")
            values.append(value if isinstance(value, str) else sign * value)
            if not self._take(","):
                break
        self._expect(")")
        return tuple(values)

    def _reduce(self, level: int) -> None:
        """Apply the pending operators that bind at least as tightly as `level` to their operands."""
        while self._pending and self._pending[-1].level >= level:
            self._apply(self._pending.pop())

    def _apply(self, pending: _Pending) -> None:
        right, depth = self._operands.pop()
        if pending.word == _HALF_BETWEEN:
            raise self._unexpected(", AND was expected")
        if pending.word == "-":
            self._push(_negative(right))
            return
        if pending.word == "NOT":
            self._push(Not(_condition(right)), depth + 1)
            return
        left, left_depth = self._operands.pop()
        if pending.word == _BETWEEN:
            value, _ = self._operands.pop()
            self._push(_between(value, left, right, negated=pending.negated), 2)
        elif pending.level in (_OR, _AND):
            depths = [
                below + (not (isinstance(side, Logic) and side.word == pending.word))
                for side, below in ((left, left_depth), (right, depth))
            ]
            self._push(_logic(pending.word, left, right), max(depths))
        else:
            self._push(_comparison(pending.word, left, right), max(left_depth, depth) + 1)

    def _push(self, node: Node, depth: int = 0) -> None:
        if depth > DEPTH_LIMIT:
            raise SqlError(f"the expression is nested deeper than {DEPTH_LIMIT}")
        self._operands.append((node, depth))

    def _count(self) -> None:
        self._nodes += 1
        if self._nodes > NODE_LIMIT:
            raise SqlError(f"the expression has more than {NODE_LIMIT} operators and operands")

    def _next(self) -> _Token:
        token, self._token = self._token, next(self._tokens)
        return token

    def _mark(self) -> str:
        return self._token.value if self._token.kind == "mark" else ""

    def _take(self, mark: str) -> bool:
        if self._mark() == mark:
            self._next()
            return True
        return False

    def _expect(self, mark: str) -> None:
        if not self._take(mark):
            raise self._unexpected(f", {mark} was expected")

    def _unexpected(self, more: str = "") -> SqlError:
        return _out_of_place(self._token, more)


def _out_of_place(token: _Token, more: str = "") -> SqlError:
    shown = token.value if len(token.value) <= _SHOWN else f"{token.value[:_SHOWN]}…"
    found = repr(shown) if shown else "the end"
    return SqlError(f"{found} at {token.at} is out of place{more}")


def _unquoted(text: str) -> str:
    return text[1:-1].replace("''", "'")


def _operand(token: _Token) -> Node:
    match token.kind, token.value:
        case "word", name:
            return Property(name)
        case "text", text:
            return Literal(_unquoted(text))
        case "integer", digits:
            whole = int(digits.rstrip("lL")) if len(digits) <= len(str(_LONG_MAX)) + 1 else _LONG_MAX + 1
            if whole > _LONG_MAX:
                raise SqlError(f"the number at {token.at} is more than {_LONG_MAX}")
            return Literal(whole)
        case "float", digits:
            number = float(digits)
            if math.isinf(number):
                raise SqlError(f"the number at {token.at} is too large")
            return Literal(number)
        case "mark", "TRUE" | "FALSE" | "NULL" as word:
            return Literal({"TRUE": True, "FALSE": False, "NULL": None}[word])
    raise _out_of_place(token)


def _is_boolean(node: Node) -> bool:
    if isinstance(node, Literal):
        return node.value is None or isinstance(node.value, bool)
    return not isinstance(node, Property | Negative)


def _condition(node: Node) -> Node:
    if isinstance(node, Property):
        return Truth(node.name)
    if not _is_boolean(node):
        raise SqlError("a number or a text is no condition")
    return node


def _negative(node: Node) -> Negative:
    value = node.value if isinstance(node, Literal | Negative) else None
    return Negative(None if value is None or isinstance(value, str | bool) else -value)


def _logic(word: str, left: Node, right: Node) -> Logic:
    parts: list[Node] = []
    for side in (_condition(left), _condition(right)):
        parts += side.parts if isinstance(side, Logic) and side.word == word else (side,)
    return Logic(word, tuple(parts))


def _comparison(word: str, left: Node, right: Node) -> Node:
    if _LEVELS[word] == _COMPARISON:
        return _ordering(word, left, right)
    for side in (left, right):
        if side == Literal(None):
            raise SqlError(f"{word} can't be used with NULL: write IS NULL")
    if isinstance(left, Literal) and isinstance(right, Literal) and _is_boolean(left) and not _is_boolean(right):
        raise SqlError(f"{left.value!r} can't be compared with {right.value!r}")
    equal = Compare("=", left, right)
    return equal if word == "=" else Not(equal)


def _ordering(word: str, left: Node, right: Node) -> Compare:
    for side in (left, right):
        if _is_boolean(side) or (isinstance(side, Literal) and isinstance(side.value, str)):
            raise SqlError(f"{word} needs numbers or properties on both sides")
    return Compare(word, left, right)


def _between(value: Node, low: Node, high: Node, *, negated: bool) -> Node:
    if negated:
        return Logic("OR", (_ordering("<", value, low), _ordering(">", value, high)))
    both = Logic("AND", (_ordering(">=", value, low), _ordering("<=", value, high)))
    if isinstance(low, Literal) and isinstance(high, Literal) and (order(high.value, low.value) or 0) < 0:
        raise SqlError(f"BETWEEN {low.value} AND {high.value} selects nothing")
    return both


def parse(text: str) -> tuple[Node, int]:
    """Return the tree of an expression, and the number of its operators and operands. Raises SqlError."""
    if len(text.encode("utf-8", "surrogatepass")) > TEXT_LIMIT_BYTES:
        raise SqlError(f"the expression has more than {TEXT_LIMIT_BYTES} bytes")
    return _Parser(text).parse()


# ---- values

_LONG_MAX = 2**63 - 1
# Digits as in Java's Character.digit. A number that does not fit into a long is read as a double.
_INTEGER = re.compile(r"(?P<sign>[+-]?)(?:0*+(?P<digits>\d{1,19})|0++)")
# The syntax of Java's Double.valueOf.
_DOUBLE = re.compile(
    r"[\x00-\x20]*(?P<sign>[+-]?)(?:(?P<name>NaN|Infinity)|(?:"
    r"(?P<decimal>(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?)"
    r"|(?P<hex>0[xX](?:[0-9a-fA-F]++\.?|[0-9a-fA-F]*+\.[0-9a-fA-F]++)[pP][+-]?[0-9]+))[fFdD]?)[\x00-\x20]*"
)
_CACHED_NUMBERS = 256  # several comparisons with one property of a message parse its text once


@functools.lru_cache(_CACHED_NUMBERS)
def to_integer(text: str) -> int | float | None:
    """Return a property's value for a comparison with an integer; None if it is no number.

    Any number is accepted; RocketMQ accepts only integers.
    """
    match = _INTEGER.fullmatch(text)
    return int(match["sign"] + (match["digits"] or "0")) if match is not None else to_double(text)


@functools.lru_cache(_CACHED_NUMBERS)
def to_double(text: str) -> float | None:
    """Return a property's value for a comparison with a floating-point number; None if it is no number."""
    match = _DOUBLE.fullmatch(text)
    if match is None:
        return None
    if match["hex"]:
        try:
            return float.fromhex(match["sign"] + match["hex"])
        except OverflowError:
            return float(match["sign"] + "inf")
    return float(match["sign"] + (match["decimal"] or match["name"]))


def to_bool(text: str) -> bool:
    """Return a property's value for a comparison with TRUE or FALSE, by Boolean.valueOf: other texts are false."""
    return text.lower() == "true"


def _like(text: str, other: int | float | bool) -> int | float | bool | None:
    if isinstance(other, bool):
        return to_bool(text)
    return to_integer(text) if isinstance(other, int) else to_double(text)


def equal(first: Any, second: Any) -> bool | None:
    """Return `first = second` as ComparisonExpression does.

    Not symmetric if a side is None. The result is None if a text that should be a number is none.
    """
    if first is None:
        return True if second is None else None
    if second is None:
        return False
    if isinstance(first, str):
        if isinstance(second, str):
            return first == second
        first = _like(first, second)
    elif isinstance(second, str):
        second = _like(second, first)
    if first is None or second is None:
        return None
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    return _sign(first, second) == 0


def order(first: Any, second: Any) -> int | None:
    """Return a value below, equal to or above zero as `first` is less than, equal to or greater than `second`.

    Returns None if a side is missing or not a number.
    """
    if isinstance(first, str) and isinstance(second, str):
        first, second = to_double(first), to_double(second)
    elif isinstance(first, str) and second is not None:
        first = _like(first, second)
    elif isinstance(second, str) and first is not None:
        second = _like(second, first)
    return None if first is None or second is None else _sign(first, second)


def _sign(first: int | float, second: int | float) -> int:
    """Java's Long.compare, or Double.compare: NaN is above all numbers, and -0.0 below 0.0."""
    if isinstance(first, int) and isinstance(second, int):
        return (first > second) - (first < second)
    first, second = float(first), float(second)
    if first < second:
        return -1
    if first > second:
        return 1
    if first == second and first != 0:
        return 0
    places = [(one != one, math.copysign(1, one) * (one == 0)) for one in (first, second)]  # noqa: PLR0124 - NaN
    return (places[0] > places[1]) - (places[0] < places[1])


# ---- closures

_SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip


def _build(node: Node) -> Evaluate:
    match node:
        case Literal(value) | Negative(value):
            return lambda properties: value
        case Property(name):
            return lambda properties: properties.get(name)
        case Truth(name):
            return lambda properties: False if name in properties else None
        case IsNull(inner):
            get = _build(inner)
            return lambda properties: get(properties) is None
        case Not(inner):
            return _build_not(_build(inner))
        case Logic(word, parts):
            return _build_logic([_build(part) for part in parts], decides=word == "OR")
        case Compare(mark, left, right):
            return _build_compare(mark, left, right)
        case OneOf(name, values, negated):
            return _build_one_of(name, values, negated=negated)
        case TextTest(word, inner, text, negated):
            return _build_text_test(word, _build(inner), text, negated=negated)


def _build_not(inner: Evaluate) -> Evaluate:
    return lambda properties: None if (value := inner(properties)) is None else not value


def _build_logic(parts: list[Evaluate], *, decides: bool) -> Evaluate:
    """Build AND or OR. A part with the value `decides` (True for OR, False for AND) determines the result.

    If no part does and one is unknown, the result is unknown.
    """

    def evaluate(properties: Properties) -> bool | None:
        result: bool | None = not decides
        for part in parts:
            value: bool | None = part(properties)
            if value is decides:
                return decides
            if value is None:
                result = None
        return result

    return evaluate


def _build_compare(mark: str, left: Node, right: Node) -> Evaluate:
    if (
        isinstance(left, Property)
        and isinstance(right, Literal | Negative)
        and not isinstance(right.value, bool | None)
    ):
        if isinstance(right.value, int | float):
            return _build_number_test(left.name, _SIGNS[mark], right.value)
        name, text = left.name, right.value
        return lambda properties: None if (value := properties.get(name)) is None else value == text
    first, second = _build(left), _build(right)
    if mark == "=":
        return lambda properties: equal(first(properties), second(properties))
    test = _SIGNS[mark]

    def evaluate(properties: Properties) -> bool | None:
        sign = order(first(properties), second(properties))
        return None if sign is None else test(sign, 0)

    return evaluate


def _build_number_test(name: str, test: Callable[[Any, Any], bool], number: int | float) -> Evaluate:
    """Build a comparison of a property with a number, the most common case. Integers are compared without `_sign`."""
    read = to_integer if isinstance(number, int) else to_double

    def evaluate(properties: Properties) -> bool | None:
        text = properties.get(name)
        value = None if text is None else read(text)
        if value is None:
            return None
        if value.__class__ is number.__class__ is int:
            return test(value, number)
        return test(_sign(value, number), 0)

    return evaluate


def _build_one_of(name: str, values: tuple[str | int | float, ...], *, negated: bool) -> Evaluate:
    texts = frozenset(value for value in values if isinstance(value, str))
    numbers = frozenset(value for value in values if not isinstance(value, str))

    def evaluate(properties: Properties) -> bool | None:
        text = properties.get(name)
        if text is None:
            return None
        return (text in texts or (bool(numbers) and to_integer(text) in numbers)) is not negated

    return evaluate


def _build_text_test(word: str, get: Evaluate, text: str, *, negated: bool) -> Evaluate:
    tests: dict[str, Callable[[str], bool]] = {
        "CONTAINS": lambda value: text in value,
        "STARTSWITH": lambda value: value.startswith(text),
        "ENDSWITH": lambda value: value.endswith(text),
    }
    test = tests[word]

    def evaluate(properties: Properties) -> bool:
        value = get(properties)
        return bool(text) and isinstance(value, str) and test(value) is not negated

    return evaluate


# ---- the filter


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """Compiled expression; `nodes` measures the work for one message."""

    evaluate: Evaluate
    nodes: int

    def __call__(self, properties: Properties) -> bool:
        return self.evaluate(properties) is True


class _Cache:
    """LRU cache of filters, limited by the total of their texts. A limit by count would allow 500 large ones."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._size = 0
        self._filters: OrderedDict[str, SqlFilter] = OrderedDict()

    def get(self, text: str) -> SqlFilter:
        found = self._filters.get(text)
        if found is not None:
            self._filters.move_to_end(text)
            return found
        node, nodes = parse(text)
        made = self._filters[text] = SqlFilter(_build(node), nodes)
        self._size += len(text)
        while self._size > self._limit:
            oldest, _ = self._filters.popitem(last=False)
            self._size -= len(oldest)
        return made


_cache = _Cache(CACHE_LIMIT_BYTES)


def compile_sql(text: str) -> SqlFilter:
    """Return the filter of an expression, from the cache if possible. Raises SqlError."""
    return _cache.get(text)
