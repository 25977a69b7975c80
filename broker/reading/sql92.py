"""The SQL92 subset of subscriptions: text → tokens → expression tree → closures over a message's properties.

Three values as in SQL: True, False and None (unknown, from a missing property or a value of the wrong kind).
A message is sent only when the whole is True.

    expression  NOT e | e AND e | e OR e | (e) | predicate | TRUE | FALSE | property
    predicate   operand (= <> != > >= < <=) operand | operand [NOT] BETWEEN number AND number
                property [NOT] IN (literal, …) | property IS [NOT] NULL
                property [NOT] (CONTAINS | STARTSWITH | ENDSWITH) 'text'
    operand     property | 'text' | number | TRUE | FALSE | NULL
"""

import functools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

TEXT_LIMIT: Final = 2048
DEPTH_LIMIT: Final = 32
TERM_LIMIT: Final = 64

Properties = Mapping[str, str]
Evaluate = Callable[[Properties], Any]


class SqlError(ValueError):
    """The text is no expression of this grammar, or a too large one."""


# ---- tokens

_TOKEN = re.compile(
    r"\s*(?:(?P<text>'(?:[^']|'')*')|(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?[lL]?|\.\d+(?:[eE][+-]?\d+)?)"
    r"|(?P<word>[A-Za-z_$][\w$.]*)|(?P<mark><>|!=|>=|<=|[=<>(),+\-]))"
)
_KEYWORDS = frozenset(
    ["AND", "OR", "NOT", "BETWEEN", "IN", "IS", "NULL", "TRUE", "FALSE", "CONTAINS", "STARTSWITH", "ENDSWITH"]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    value: str
    at: int


def _tokens(text: str) -> list[_Token]:
    found, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise SqlError(f"{text[position : position + 10]!r} at {position} is not understood")
        kind = match.lastgroup or ""
        value = match[kind]
        if kind == "word" and value.upper() in _KEYWORDS:
            kind, value = "mark", value.upper()
        found.append(_Token(kind, value, match.start(kind if match.lastgroup == kind else "word")))
        position = match.end()
    found.append(_Token("end", "", end))
    return found


# ---- tree


@dataclass(frozen=True, slots=True)
class Property:
    """A message's property as an operand."""

    name: str


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant; None is SQL's NULL."""

    value: str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Not:
    """NOT e: unknown stays unknown."""

    inner: "Node"


@dataclass(frozen=True, slots=True)
class Logic:
    """`e AND e` or `e OR e`, in SQL's three values."""

    word: str
    left: "Node"
    right: "Node"


@dataclass(frozen=True, slots=True)
class Compare:
    """An operand against another: `= <> < > <= >=`. Unknown where a side is missing or they are of different kinds."""

    mark: str
    left: "Node"
    right: "Node"


@dataclass(frozen=True, slots=True)
class OneOf:
    """`property IN (…)`; unknown where the message has no such property."""

    name: str
    values: tuple[str | int | float, ...]


@dataclass(frozen=True, slots=True)
class IsNull:
    """`property IS NULL`, the one question that is never unknown."""

    name: str


@dataclass(frozen=True, slots=True)
class TextTest:
    """`property CONTAINS | STARTSWITH | ENDSWITH 'text'`, RocketMQ's additions to SQL92."""

    word: str
    name: str
    text: str


Node = Property | Literal | Not | Logic | Compare | OneOf | IsNull | TextTest

# Binding powers: what stands further down binds tighter.
_POWER = {"OR": 1, "AND": 2}
_NOT_POWER = 3
_COMPARISONS = ("=", "<>", "!=", ">", ">=", "<", "<=")
_TEXT_TESTS = ("CONTAINS", "STARTSWITH", "ENDSWITH")


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._position = self._depth = self._terms = 0

    def parse(self) -> Node:
        node = self._expression(0)
        if self._peek().kind != "end":
            raise self._unexpected(self._peek())
        return node

    def _expression(self, power: int) -> Node:
        self._depth += 1
        if self._depth > DEPTH_LIMIT:
            raise SqlError(f"the expression is nested deeper than {DEPTH_LIMIT}")
        left = self._prefix()
        while (word := self._peek().value) in _POWER and self._peek().kind == "mark" and _POWER[word] > power:
            self._next()
            left = Logic(word, left, self._expression(_POWER[word]))
        self._depth -= 1
        return left

    def _prefix(self) -> Node:
        if self._take("NOT"):
            return Not(self._expression(_NOT_POWER))
        if self._take("("):
            inner = self._expression(0)
            self._expect(")")
            return inner
        return self._predicate()

    def _predicate(self) -> Node:
        self._count()
        start = self._peek()
        left = self._operand()
        token = self._peek()
        if token.kind == "mark" and token.value in _COMPARISONS:
            self._next()
            return self._comparison(token, left, self._operand())
        if self._take("IS"):
            negated = self._take("NOT")
            self._expect("NULL")
            return _negate(IsNull(self._property(left, token)), negated=negated)
        negated = self._take("NOT")
        token = self._peek()
        if self._take("BETWEEN"):
            return _negate(self._between(token, left), negated=negated)
        if self._take("IN"):
            return _negate(OneOf(self._property(left, token), self._list()), negated=negated)
        if token.kind == "mark" and token.value in _TEXT_TESTS:
            self._next()
            return _negate(TextTest(token.value, self._property(left, token), self._text()), negated=negated)
        if negated or not (isinstance(left, Property) or (isinstance(left, Literal) and isinstance(left.value, bool))):
            raise self._unexpected(token if negated or token.kind == "end" else start)
        return left

    def _comparison(self, token: _Token, left: Node, right: Node) -> Node:
        ordered = token.value in (">", ">=", "<", "<=")
        for side in (left, right):
            if isinstance(side, Literal) and (side.value is None or (ordered and isinstance(side.value, str | bool))):
                raise SqlError(f"{token.value} at {token.at} can't be used with {side.value!r}")
        return Compare(token.value, left, right)

    def _between(self, token: _Token, left: Node) -> Node:
        low = self._operand()
        self._expect("AND")
        high = self._operand()
        self._count()
        for side in (low, high):
            if not isinstance(side, Literal) or isinstance(side.value, bool) or not isinstance(side.value, int | float):
                raise SqlError(f"BETWEEN at {token.at} needs two numbers")
        return Logic("AND", Compare(">=", left, low), Compare("<=", left, high))

    def _list(self) -> tuple[str | int | float, ...]:
        self._expect("(")
        values: list[str | int | float] = []
        while True:
            token = self._peek()
            operand = self._operand()
            if not isinstance(operand, Literal) or operand.value is None or isinstance(operand.value, bool):
                raise self._unexpected(token)
            values.append(operand.value)
            self._count()
            if not self._take(","):
                break
        self._expect(")")
        return tuple(values)

    def _operand(self) -> Node:
        token = self._next()
        if token.kind == "word":
            return Property(token.value)
        if token.kind == "text":
            return Literal(token.value[1:-1].replace("''", "'"))
        if token.kind == "number":
            return Literal(_number(token.value))
        if token.value in ("+", "-") and self._peek().kind == "number":
            value = _number(self._next().value)
            return Literal(-value if token.value == "-" else value)
        if token.kind == "mark" and token.value in ("TRUE", "FALSE", "NULL"):
            return Literal({"TRUE": True, "FALSE": False, "NULL": None}[token.value])
        raise self._unexpected(token)

    def _property(self, node: Node, token: _Token) -> str:
        if not isinstance(node, Property):
            raise SqlError(f"{token.value} at {token.at} needs a property before it")
        return node.name

    def _text(self) -> str:
        token = self._peek()
        operand = self._operand()
        if not isinstance(operand, Literal) or not isinstance(operand.value, str):
            raise self._unexpected(token)
        return operand.value

    def _count(self) -> None:
        self._terms += 1
        if self._terms > TERM_LIMIT:
            raise SqlError(f"the expression has more than {TERM_LIMIT} terms")

    def _peek(self) -> _Token:
        return self._tokens[self._position]

    def _next(self) -> _Token:
        token = self._tokens[self._position]
        self._position = min(self._position + 1, len(self._tokens) - 1)
        return token

    def _take(self, mark: str) -> bool:
        token = self._peek()
        if token.kind == "mark" and token.value == mark:
            self._position += 1
            return True
        return False

    def _expect(self, mark: str) -> None:
        if not self._take(mark):
            raise self._unexpected(self._peek(), f", {mark} was expected")

    @staticmethod
    def _unexpected(token: _Token, more: str = "") -> SqlError:
        what = repr(token.value) if token.value else "the end"
        return SqlError(f"{what} at {token.at} is out of place{more}")


def _negate(node: Node, *, negated: bool) -> Node:
    return Not(node) if negated else node


def parse(text: str) -> Node:
    if len(text.encode("utf-8", "surrogatepass")) > TEXT_LIMIT:
        raise SqlError(f"the expression has more than {TEXT_LIMIT} bytes")
    return _Parser(text).parse()


# ---- closures

_NUMBER = re.compile(r"[+-]?(?:\d{1,300}(?:\.\d{0,300})?|\.\d{1,300})(?:[eE][+-]?\d{1,4})?")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "<>": operator.ne, "!=": operator.ne,
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip


def _number(text: str) -> int | float:
    bare = text.rstrip("lL")
    return int(bare) if bare.lstrip("+-").isdigit() else float(bare)


def to_number(text: str) -> int | float | None:
    """A property's value as a number; None if it is none."""
    return _number(text) if text.isascii() and _NUMBER.fullmatch(text) else None


def to_bool(text: str) -> bool | None:
    return {"true": True, "false": False}.get(text.lower())


def _build(node: Node) -> Evaluate:
    match node:
        case Literal(value):
            return lambda properties: value
        case Property(name):
            return lambda properties: None if (text := properties.get(name)) is None else to_bool(text) is True
        case IsNull(name):
            return lambda properties: name not in properties
        case Not(inner):
            return _build_not(_build(inner))
        case Logic(word, left, right):
            return _build_logic(_build(left), _build(right), stop=word == "OR")
        case Compare(mark, left, right):
            return _build_compare(_OPERATORS[mark], left, right)
        case OneOf(name, values):
            return _build_one_of(name, values)
        case TextTest(word, name, text):
            return _build_text_test(word, name, text)


def _build_not(inner: Evaluate) -> Evaluate:
    return lambda properties: None if (value := inner(properties)) is None else not value


def _build_logic(left: Evaluate, right: Evaluate, *, stop: bool) -> Evaluate:
    """`stop` decides alone: True for OR, False for AND; unknown stays unless the other side decides."""

    def evaluate(properties: Properties) -> bool | None:
        first = left(properties)
        if first is stop:
            return bool(stop)
        second = right(properties)
        if second is stop:
            return bool(stop)
        return None if first is None or second is None else not stop

    return evaluate


def _operand_of(node: Node) -> Evaluate:
    if isinstance(node, Property):
        name = node.name
        return lambda properties: properties.get(name)
    return _build(node)


def _build_compare(compare: Callable[[Any, Any], bool], left: Node, right: Node) -> Evaluate:
    """Properties are text: one compared with a number or a truth value is read as that kind."""
    cast_left, cast_right = _cast_for(right), _cast_for(left)
    get_left, get_right = _operand_of(left), _operand_of(right)

    def evaluate(properties: Properties) -> bool | None:
        first, second = get_left(properties), get_right(properties)
        if cast_left is not None and isinstance(first, str):
            first = cast_left(first)
        if cast_right is not None and isinstance(second, str):
            second = cast_right(second)
        if first is None or second is None or isinstance(first, str) is not isinstance(second, str):
            return None
        return compare(first, second)

    return evaluate


def _cast_for(other: Node) -> Callable[[str], Any] | None:
    if not isinstance(other, Literal) or isinstance(other.value, str):
        return None
    return to_bool if isinstance(other.value, bool) else to_number


def _build_one_of(name: str, values: tuple[str | int | float, ...]) -> Evaluate:
    texts = frozenset(value for value in values if isinstance(value, str))
    numbers = frozenset(value for value in values if not isinstance(value, str))

    def evaluate(properties: Properties) -> bool | None:
        text = properties.get(name)
        if text is None:
            return None
        return text in texts or (bool(numbers) and to_number(text) in numbers)

    return evaluate


def _build_text_test(word: str, name: str, text: str) -> Evaluate:
    tests: dict[str, Callable[[str], bool]] = {
        "CONTAINS": lambda value: text in value,
        "STARTSWITH": lambda value: value.startswith(text),
        "ENDSWITH": lambda value: value.endswith(text),
    }
    test = tests[word]
    return lambda properties: None if (value := properties.get(name)) is None else test(value)


@functools.lru_cache(maxsize=512)
def compile_sql(text: str) -> Callable[[Properties], bool]:
    """A predicate over properties. Raises SqlError."""
    evaluate = _build(parse(text))
    return lambda properties: evaluate(properties) is True
