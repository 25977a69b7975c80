"""SQL92 filters compared with RocketMQ's own classes: the same expressions are valid and select the same messages.

Every difference has a name in `DIFFERENCES`; `docs/reference/compatibility.md` lists them for users.
"""

from __future__ import annotations

import collections
import random
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import jvm
from broker.reading.sql92 import SqlError, compile_sql

pytestmark = pytest.mark.servers

_S = 120.0
_SOURCES = Path(__file__).parent / "java_filter"
REFUSED = "refused"
_LETTERS = {True: "T", False: "F", None: "N"}

#: The reason for each named difference.
DIFFERENCES = {
    "text after the expression": "RocketMQ ignores it, so part of the filter has no effect; neve refuses the filter",
    "failed comparison": "RocketMQ skips the message; neve takes that comparison as unknown or compares by value",
    "extension !=": "an operator that RocketMQ refuses",
    "extension name": "names with dots and letters beyond ASCII, which RocketMQ refuses",
    "extension IN numbers": "IN with numbers, which RocketMQ refuses",
    "zero as 0.0": "RocketMQ refuses 0.0 as less than the least double",
}

VALUES = [
    "5", "-5", "+5", "05", "0", "-0", "5.0", "2.50", "5.", ".5", "1e1", "1E400", "-1e400", "5d", "5F", " 5 ", "\t5",
    "5L", "0x10", "0x1p4", "NaN", "-NaN", "Infinity", "-0.0", "0.0", "nan", "inf", "", " ", "1_0", "٣", "٣.٠",
    "2147483648", "9223372036854775807", "9223372036854775808", "9007199254740993", "0" * 40 + "7", "true", "TRUE",
    "false", "yes", "x", "axb", "it's", "Oslo", "'", "x" * 300,
]  # fmt: skip
_PAIRS = [
    ("5", "5"), ("5", "7"), ("5.0", "5"), ("x", "x"), ("true", "true"), ("-0.0", "0.0"), ("NaN", "NaN"), ("9", "10"),
    ("x", "y"), ("1e1", "10"), ("true", "5"),
]  # fmt: skip
#: Messages with one property at a time, so that each value meets each operator, and with several together.
SETS: list[dict[str, str]] = [
    {},
    *({"a": value} for value in VALUES),
    *({"a": one, "b": other} for one, other in _PAIRS),
    {"b": "5"},
    {"b": "true"},
    {"b": "x"},
    {"a": "3", "b": "5", "c": "6", "d": "1"},
    {"a": "4", "b": "4", "c": "3", "d": "10"},
    {"TAGS": "''tag''", "a": "1"},
]

#: Subjects of RocketMQ's own filter tests (ExpressionTest, ParserTest), its grammar and its special cases, one per
#: line; then those that contain line breaks.
TABLE = [
    *(Path(__file__).parent / "filters.txt").read_text().splitlines(),
    "a contains ", "a startsWith ", "a ENDSWITH ", "a not contains ", "a not startsWith ", "a not ENDSWITH ",
    "'axb' contains ", "'axb' startsWith ", "'axb' ENDSWITH ", "'axb' not contains ", "'axb' not startsWith ",
    "'axb' not ENDSWITH ", "' ' contains ", "' ' startsWith ", "' ' ENDSWITH ", "' ' not contains ",
    "' ' not startsWith ", "' ' not ENDSWITH ", "5 contains ", "5 startsWith ", "5 ENDSWITH ", "5 not contains ",
    "5 not startsWith ", "5 not ENDSWITH ", "TRUE contains ", "TRUE startsWith ", "TRUE ENDSWITH ",
    "TRUE not contains ", "TRUE not startsWith ", "TRUE not ENDSWITH ", "(a = 5) contains ", "(a = 5) startsWith ",
    "(a = 5) ENDSWITH ", "(a = 5) not contains ", "(a = 5) not startsWith ", "(a = 5) not ENDSWITH ", "-a contains ",
    "-a startsWith ", "-a ENDSWITH ", "-a not contains ", "-a not startsWith ", "-a not ENDSWITH ", "NULL contains ",
    "NULL startsWith ", "NULL ENDSWITH ", "NULL not contains ", "NULL not startsWith ", "NULL not ENDSWITH ",
    "a=3  and\n b<>4\tAnd c>5 AND d<=4", "", " ", "\n", "- ", "a = 5\u000b", "a\u00a0= 5", "a = 5 -- behind\n",
    "a = 5 -- behind\nAND b = 5", "a = 5 -- behind\rAND b = 5", "a = 5 -- 'x\n", "-- before\na = 5", "a = --5\n5",
    "a in ('5' -- one\n, 'x')",
    f"a > {'1' * 3000}.{'1' * 3000}",
    f"a in ({','.join(repr(str(number)) for number in range(2000))})",
    " OR ".join(f"a = '{number}'" for number in range(400)),
    " AND ".join(["a = 5"] * 65),
    f"a = '{'x' * 3000}'",
    "(" * 100 + "a = 5" + ")" * 100,
    "NOT " * 100 + "a",
    "(" * 150 + "a = 5" + "".join(f" OR b = {number})" for number in range(150)),
]  # fmt: skip


class ApacheFilters:
    """RocketMQ's filter classes, in a process that answers questions."""

    def __init__(self, home: Path) -> None:
        self._command = jvm.java(jvm.classes(_SOURCES), "Filter", home=home)

    def answers(self, expressions: Sequence[str]) -> list[str]:
        lines = [
            " ".join(["P", *(text.encode().hex() for pair in properties.items() for text in pair)])
            for properties in SETS
        ]
        lines += ["E " + expression.encode().hex() for expression in expressions]
        done = subprocess.run(
            self._command, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=_S, check=True
        )
        found = done.stdout.splitlines()
        assert len(found) == len(expressions), done.stderr[-2000:]
        return found


@pytest.fixture(scope="module")
def apache(tmp_path_factory: pytest.TempPathFactory) -> ApacheFilters:
    return ApacheFilters(tmp_path_factory.mktemp("filter"))


def answer(expression: str) -> str:
    """Return neve's result in the letters of `Filter.java`, or its error."""
    try:
        chosen = compile_sql(expression)
    except SqlError as error:
        return f"{REFUSED}: {error}"
    return "".join(_LETTERS[chosen.evaluate(properties)] for properties in SETS)


def _extension(expression: str) -> str | None:
    """Return the name of the difference by which RocketMQ rejects an expression that neve accepts."""
    bare = re.sub(r"'(?:[^']|'')*'", "'", expression)
    if "!=" in bare:
        return "extension !="
    if re.search(r"[A-Za-z_$]\.[A-Za-z_$]|[^\W\d]", re.sub(r"[A-Za-z0-9_]", "", bare)) or re.search(
        r"[a-z]\.[a-z]", bare
    ):
        return "extension name"
    if re.search(r"\bIN\s*\([^()]*\d[^()]*\)", bare, re.IGNORECASE):
        return "extension IN numbers"
    if re.search(r"\b0*\.0*(?!\d)|\.0+\b|\de-400", bare):
        return "zero as 0.0"
    return None


def differences(expressions: Sequence[str], apache: ApacheFilters) -> collections.Counter[str | None]:
    """Count the differences by name, None for no difference. Fail if a difference has no name."""
    theirs = apache.answers(expressions)
    found: collections.Counter[str | None] = collections.Counter()
    complete: dict[str, str] = {}
    for expression, their in zip(expressions, theirs, strict=True):
        ours = answer(expression)
        if ours.startswith(REFUSED) and their != REFUSED:
            # RocketMQ's result equals that for the text before the position of our error.
            at = re.search(r" at (\d+) is (?:out of place|not understood)", ours)
            assert at is not None, f"{expression!r}: {ours}; RocketMQ takes it"
            complete[expression[: int(at[1])]] = their
            found["text after the expression"] += 1
        elif their == REFUSED and not ours.startswith(REFUSED):
            name = _extension(expression)
            assert name is not None, f"{expression!r} is taken; RocketMQ refuses it"
            found[name] += 1
        elif their == REFUSED:
            found[None] += 1
        else:
            assert not _unlike(ours, their), f"{expression!r}: {_unlike(ours, their)}"
            found["failed comparison" if "X" in their else None] += 1
    for expression, alone in zip(complete, apache.answers(list(complete)), strict=True):
        assert alone == complete[expression], f"what RocketMQ takes behind {expression!r} has an effect"
        assert not _unlike(answer(expression), alone), f"{expression!r}: {answer(expression)}"
    return found


def _unlike(ours: str, theirs: str) -> list[tuple[dict[str, str], str, str]]:
    """Return the messages for which RocketMQ has a result and neve has another one."""
    if len(ours) != len(theirs):
        return [({}, ours, theirs)]
    return [
        (properties, mine, their)
        for properties, mine, their in zip(SETS, ours, theirs, strict=True)
        if their != "X" and mine != their
    ]


def test_filters_of_the_table_select_like_rocketmq(apache: ApacheFilters) -> None:
    found = differences(TABLE, apache)
    assert found.keys() - {None} == DIFFERENCES.keys()
    assert found[None] > 500


_PLAIN = (
    "a", "a", "b", "c", "5", "-5", "5.0", "2.5", "0", "10L", "1e1", "'5'", "'x'", "'true'", "''", "TRUE", "FALSE",
    "NULL",
)  # fmt: skip
_TEXTS = ("'x'", "'5'", "''", "'it''s'", "'ax'", "'true'")
_MARKS = ("=", "<>", "=", "<>", ">", ">=", "<", "<=")
_DAMAGE = ("", ")", "(", "AND", "NOT", "-", "x", "/* c */", "--", "\n")


class Maker:
    """Generates random expressions of the grammar; one in ten is damaged, and RocketMQ rejects most of those."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def expression(self) -> str:
        pick = self._random
        text = self._condition(pick.choice([0, 1, 1, 2, 2, 3]))
        if pick.random() < 0.1:
            words = text.split(" ")
            at = pick.randrange(len(words))
            words[at : at + pick.choice([0, 1])] = [pick.choice(_DAMAGE)]
            text = " ".join(words)
        return text

    def _condition(self, depth: int) -> str:
        pick = self._random
        if not depth:
            return self._predicate()
        left, right = self._condition(depth - 1), self._condition(pick.randrange(depth))
        return pick.choice([
            f"{left} AND {right}", f"{left} OR {right}", f"( {left} ) AND ( {right} )", f"( {left} OR {right} )",
            f"NOT ( {left} )", f"NOT {left}", f"( {left} ) = {right}", f"{left} IS NULL", f"( {left} ) IS NOT NULL",
            f"{left} = {self._operand()}",
        ])  # fmt: skip

    def _predicate(self) -> str:
        pick = self._random
        left, right, maybe_not = self._operand(), self._operand(), pick.choice(["", "", "NOT "])
        texts = " , ".join(pick.choices(_TEXTS, k=pick.randrange(1, 7)))
        word = pick.choice(["CONTAINS", "STARTSWITH", "ENDSWITH"])
        return pick.choice([
            *[f"{left} {pick.choice(_MARKS)} {right}"] * 6,
            f"{left} IS {maybe_not}NULL", f"{left} {maybe_not}BETWEEN {right} AND {self._operand()}",
            f"{left} {maybe_not}IN ( {texts} )", f"{left} {maybe_not}{word} {pick.choice(_TEXTS)}", left,
        ])  # fmt: skip

    def _operand(self) -> str:
        pick = self._random
        plain = pick.choice(["a", "b", pick.choice(_PLAIN)])
        return pick.choice([*[plain] * 8, f"- {plain}", f"+ {plain}", f"( {plain} )"])


def test_random_filters_select_like_rocketmq(apache: ApacheFilters) -> None:
    maker = Maker(seed=92)
    expressions = sorted({maker.expression() for _ in range(6000)})
    found = differences(expressions, apache)
    assert found.keys() == {None, "failed comparison", "text after the expression"}
    assert found[None] > 2500
    assert found["failed comparison"] > 1500
