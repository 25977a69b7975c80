"""Checks of the rules in the section "How we write" of CONTRIBUTING.

The limits in `language_limits.json` state how many findings of each kind a package still has. A change may lower them
and may not raise them. `NEVE_GOLDEN=write` writes the present counts.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMITS = Path(__file__).with_name("language_limits.json")
LONGEST_TEST_NAME = 70
DISTRIBUTED = ("access", "broker", "controller", "infra", "lifecycle", "namesrv", "neve", "pyspark_neve", "tiered")
PAGES = (
    "docs",
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    "changes",
)
#: Calls whose text arguments a user reads.
SHOWN = {"debug", "info", "warning", "error", "exception", "critical", "option", "argument", "command", "echo"}
SHOWN_SUFFIXES = ("Error", "Refused", "Failure", "Unavailable")

# A sentence has a noun as its subject, and not a clause.
CLAUSE_AS_SUBJECT = re.compile(
    r"(What|Who|Whoever|Whose|As it|The same|Of (?:one|a|the|what)|Where it|How far|That which)\b"
)
# Machines log, return and report. They are no persons.
MACHINE_AS_PERSON = re.compile(
    r"\b(nobody|somebody|everybody|whoever|tells|told|says|said"
    r"|who (?:asks|asked|comes|follows|had|has|hung|is|lacks|may|waits|was))\b",
    re.IGNORECASE,
)
# Words that name no state of the field.
VAGUE = re.compile(
    r"\b(any more|anew|at hand|give[ns]? up|go(?:es|ing)? on|went on|let go of|lets go|lies|no more|set aside"
    r"|so long as|so many|stands|takes? no more)\b",
    re.IGNORECASE,
)
RULES = {"clause": CLAUSE_AS_SUBJECT.match, "person": MACHINE_AS_PERSON.search, "vague": VAGUE.search}
_SENTENCE_END = re.compile(r"(?<=[.:;])\s+|\n\s*\n")


def findings(text: str) -> Iterator[tuple[str, str]]:
    """Yield (rule, sentence) for each sentence of a text that breaks a rule."""
    for sentence in _SENTENCE_END.split(text.strip()):
        words = " ".join(sentence.split())
        for rule, breaks in RULES.items():
            if words and breaks(words):
                yield rule, words


def texts_of_python(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of docstrings, comments and the messages of errors, logs and the command line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in SHOWN or name.endswith(SHOWN_SUFFIXES):
                values = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "help")]
                for value in values:
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield value.lineno, value.value
    # Tokens are slow: only of a file in which the rest of some line after a "#" breaks a rule.
    if any(any(findings(line.partition("#")[2].lstrip("#: "))) for line in source.splitlines() if "#" in line):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("#: ")


def texts_of_page(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of a Markdown page without its code blocks; each cell of a table is a text."""
    in_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            for cell in line.split("|"):
                yield number, cell.strip(" #->*")


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] == "neve" and len(parts) > 2 else parts[0]


@cache
def files() -> tuple[Path, ...]:
    tops = [*(ROOT / name for name in DISTRIBUTED), ROOT / "tests", ROOT / "bench", ROOT / "examples"]
    pages = [
        page for name in PAGES for page in ([ROOT / name] if name.endswith(".md") else (ROOT / name).rglob("*.md"))
    ]
    return tuple(sorted([*(path for top in tops for path in top.rglob("*.py")), *pages]))


@cache
def found() -> dict[str, list[str]]:
    """Return the findings of each kind in each package, by `package: kind`."""
    all_findings: dict[str, list[str]] = defaultdict(list)
    classes: dict[str, list[str]] = defaultdict(list)
    for path in files():
        source, name = path.read_text(), str(path.relative_to(ROOT))
        # Trees are not kept: the collector of cycles would walk all of them again and again.
        tree = ast.parse(source) if path.suffix == ".py" else None
        for line, text in texts_of_python(source, tree) if tree else texts_of_page(source):
            for rule, sentence in findings(text):
                all_findings[f"{package_of(path)}: {rule}"].append(f"{name}:{line}: {sentence}")
        if tree and name.startswith("tests/"):
            all_findings["tests: name over 70 characters"] += (
                f"{name}:{line}: {test}" for line, test in long_test_names(tree)
            )
            all_findings["tests: import of a test module"] += (
                f"{name}:{line}: {module}" for line, module in imports_of_test_modules(tree)
            )
        elif tree and path.relative_to(ROOT).parts[0] in DISTRIBUTED:
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    classes[node.name].append(name)
    all_findings["distribution: class name used twice"] = [
        f"{name}: {', '.join(paths)}" for name, paths in sorted(classes.items()) if len(paths) > 1
    ]
    return dict(all_findings)


def long_test_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test_"):
            continue
        if len(node.name) > LONGEST_TEST_NAME:
            yield node.lineno, node.name


def imports_of_test_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and re.search(r"(^|\.)test_\w+$", node.module):
            yield node.lineno, node.module


def test_no_package_exceeds_its_limit_of_findings() -> None:
    counts = Counter({kind: len(all_findings) for kind, all_findings in found().items() if all_findings})
    if os.environ.get("NEVE_GOLDEN") == "write":
        LIMITS.write_text(json.dumps(dict(sorted(counts.items())), indent=2) + "\n")
    limits = json.loads(LIMITS.read_text())
    over = {kind: found()[kind] for kind in sorted(counts) if counts[kind] > limits.get(kind, 0)}
    report = "\n".join(f"{kind}: {limits.get(kind, 0)} allowed\n  " + "\n  ".join(over[kind][-40:]) for kind in over)
    assert not over, f"rewrite the sentences that your change adds (CONTRIBUTING, How we write):\n{report}"


@pytest.mark.parametrize(
    ("sentence", "rule"),
    [
        ("What is not archived stays.", "clause"),
        ("The log says so.", "person"),
        ("The reader goes on at the next offset.", "vague"),
    ],
)
def test_each_rule_finds_its_pattern(sentence: str, rule: str) -> None:
    assert [kind for kind, _ in findings(f"Unarchived segments stay.\n\n{sentence}")] == [rule]
    source = f'def f():\n    """{sentence}"""\n    raise ValueError("{sentence}")  # {sentence}\n'
    assert [line for line, text in texts_of_python(source, ast.parse(source)) if list(findings(text))] == [2, 3, 3]
    assert [
        line for line, text in texts_of_page(f"```\n{sentence}\n```\n| a | {sentence} |") if list(findings(text))
    ] == [4]
