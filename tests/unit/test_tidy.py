"""Checks of coding rules: no unused module, no direct use of clocks, random numbers, files or sleeps."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("access", "broker", "controller", "infra", "lifecycle", "namesrv", "neve", "pyspark_neve", "tiered")
# Run by name: `python -m`, or named in pyproject.toml.
STARTED = {
    "tiered.worker.__main__",
    "infra.objects.minio",
    "neve.cli.main",
    "broker.command",
    "namesrv.command",
    "controller.command",
}
# Imported by users.
OFFERED = {"neve.client.sync"}
# Imported when a command runs (`neve.cli.main`).
NAMED_IN_TEXT = re.compile(r"\"((?:neve|broker|namesrv|controller)(?:\.\w+)+)")
MARKS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
# Only these modules read the system clocks, and only this one uses random numbers.
CLOCKS = {"infra/clock.py", "neve/clock.py"}
DICE = {"neve/entropy.py"}
TIMES = {
    *(
        f"time.{name}{unit}"
        for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
        for unit in ("", "_ns")
    ),
    *("time.gmtime", "time.localtime", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"),
}
THROWS = re.compile(r"(os\.urandom|uuid\.uuid[14]|secrets\.\w+|random\.(?!Random$)\w+|\w+\.SystemRandom)$")

# Outside `infra`, files are accessed through an injected `Disk`. Exceptions with reasons:
TOUCH_FILES = {
    "access/server_checks.py": "looks at the mode of the files that hold secrets",
    "access/store.py": "looks at a file's time and size: whether somebody else has written it",
    "broker/doctor.py": "looks before any broker runs",
    "broker/set_on_one_machine.py": "starts brokers, and gives each the file that its log goes to",
    "neve/archive/store/s3_credentials.py": "looks whether a user's credential files have changed",
    "neve/archive/store/source.py": "users read an archive in a directory without a server's packages",
    "neve/cli/admin.py": "reads the token file that a broker on this machine wrote",
    "neve/cli/contexts.py": "a user's own file",
    "neve/cli/checks.py": "looks at a machine on which nothing runs yet",
    "neve/cli/diverged.py": "what a broker gave up, read on its machine without it",
    "neve/cli/export_files.py": "an export, in a user's directory",
    "neve/cli/exporting.py": "an export, in a user's directory",
    "neve/cli/importing.py": "an export, in a user's directory",
    "neve/cli/doctor.py": "looks at a machine on which nothing runs yet",
    "neve/cli/passwords.py": "a password in a user's file",
    "neve/cli/process_cpu.py": "looks at a process of this machine, in /proc",
    "neve/cli/produce.py": "files that a user sends",
    "neve/cli/stdin_lines.py": "standard input",
    "neve/cli/stdout_bytes.py": "standard output",
    "neve/client/group/offset_store.py": "a broadcasting consumer's offsets, on the user's machine",
    "neve/client/security.py": "a user's credentials, which `mqadmin` reads as well",
    "neve/demo/servers.py": "starts servers, and keeps their logs",
    "neve/demo/tour.py": "a directory of the demo, its log of Spark and its report",
    "neve/extras.py": "the package's own metadata",
    "neve/copy/task_files.py": "a user's replays, on the user's machine",
    "neve/server_packages.py": "looks whether it is in a checkout or installed from a wheel",
    "neve/spark/jars.py": "Spark's jars, on the user's machine",
    "neve/spark/manifest.py": "a list for Spark's driver, on the user's machine",
    "neve/spark/schema_files.py": "a user's schema of bodies",
    "neve/spark/verify_notes.py": "a note of checked objects, on the user's machine",
    "tiered/worker/client.py": "descriptors that came over the socket to a worker",
    "tiered/worker/frames.py": "memory without a name that is handed to the other process",
    "tiered/worker/group_memory.py": "memory without a name that the other process fills",
    "tiered/worker/pipeline.py": "memory without a name that is handed to the other process",
    "tiered/worker/process.py": "descriptors that came over the socket from the broker",
    "tiered/worker/compacting.py": "the worker copies objects into a directory of its own",
    "tiered/write/compactor.py": "the worker reads these copies and writes a file of its own to upload",
    "tiered/worker/work_dir.py": "what a worker that was killed leaves in its directory",
    "tiered/worker/writing.py": "what came with a request, and where a large object is made",
    "tiered/write/segment_writer.py": "the worker maps sealed log files and writes a file of its own to upload",
}
# Calls that access files: by full name; by method names unique to paths; by method names without arguments.
FILE_CALLS = re.compile(
    r"(open|io\.open|(shutil|tempfile|fcntl)\.\w+|mmap\.mmap|TemporaryDirectory|NamedTemporaryFile|TemporaryFile"
    r"|os\.(?!getpid$|geteuid$|cpu_count$|fspath$|environ\b|kill$|urandom$|sched_\w+$|_exit$)\w+|os\.path\.(exists|is\w+|get\w+))$"
)
PATH_CALLS = {
    *("read_text", "read_bytes", "write_text", "write_bytes", "mkdir", "rmdir", "unlink", "hardlink_to"),
    *("symlink_to", "chmod", "lstat", "rglob", "glob"),
}
BARE_PATH_CALLS = {"exists", "is_file", "is_dir", "iterdir", "stat", "resolve"}

# Modules that users import: their functions need docstrings, too.
PUBLIC = ("neve/__init__.py", "neve/admin/", "neve/client/", "neve/archive/", "neve/spark/", "neve/record/")


@cache
def trees() -> dict[Path, ast.Module]:
    found = {}
    for folder in (*PACKAGES, "bench", "examples", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found[path.relative_to(ROOT)] = ast.parse(path.read_text("utf-8"))
    return found


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def test_every_recorded_bug_has_its_test() -> None:
    """Otherwise, the regression test of a recorded bug could be removed or renamed without notice."""
    faults = []
    for line in (ROOT / "tests" / "TRACK_RECORD.md").read_text("utf-8").splitlines():
        if not line.startswith("| ") or line.startswith("| bug "):
            continue
        cells = line.strip("| ").split(" | ")
        tests = re.findall(r"`([^`]+\.py)(?:::(\w+))?`", cells[-1])
        if len(cells) != 4 or not tests:
            faults.append(f"not bug, found by, root cause and test: {line[:100]}")
        for name, function in tests:
            path = ROOT / "tests" / name
            if not path.is_file() or (function and f"def {function}(" not in path.read_text("utf-8")):
                faults.append(f"no such test: {name}::{function}")
    assert faults == []


def test_every_module_is_imported_or_run() -> None:
    modules = {
        ".".join(path.with_suffix("").parts)
        for path in trees()
        if path.parts[0] in PACKAGES and path.name != "__init__.py"
    }
    used = STARTED | OFFERED
    for path, tree in trees().items():
        if path.parts[0] not in (*PACKAGES, "examples"):
            continue
        own = ".".join(path.with_suffix("").parts)
        used |= set(NAMED_IN_TEXT.findall((ROOT / path).read_text("utf-8")))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and own != node.module:
                used |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
            elif isinstance(node, ast.Import):
                used |= {name.name for name in node.names}
    assert modules - used == set()


def test_code_has_no_todo_marks() -> None:
    marked = [
        str(path) for path in trees() if path.name != Path(__file__).name and MARKS.search((ROOT / path).read_text())
    ]
    assert marked == []


def test_tests_do_not_sleep() -> None:
    sleeps = [
        f"{path}:{call.lineno}"
        for path, tree in trees().items()
        if path.parts[0] == "tests"
        for call in calls(tree)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "sleep"
        if ast.unparse(call) != "asyncio.sleep(0)"  # one turn of the loop
    ]
    assert sleeps == []


def test_clocks_and_random_numbers_are_injected() -> None:
    """References count as well as calls, because defaults and factories call later."""
    looks = []
    for path, tree in trees().items():
        if path.parts[0] not in PACKAGES:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                named = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                named = [ast.unparse(node)]
            else:
                continue
            for name in named:
                at_clock = name in TIMES and path.as_posix() not in CLOCKS
                if at_clock or (THROWS.match(name) and path.as_posix() not in DICE):
                    looks.append(f"{path}:{node.lineno} {name}")
    assert looks == []


def touches_files(call: ast.Call) -> bool:
    if FILE_CALLS.match(ast.unparse(call.func)):
        return True
    if not isinstance(call.func, ast.Attribute):
        return False
    given, name = [*call.args, *call.keywords], call.func.attr
    is_mode = bool(call.args) and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    return (name == "open" and is_mode) or name in PATH_CALLS or (name in BARE_PATH_CALLS and not given)


def test_only_infra_accesses_files() -> None:
    """Other packages use an injected disk, so that tests can simulate faults and power cuts."""
    touching = Counter(
        path.as_posix()
        for path, tree in trees().items()
        if path.parts[0] in PACKAGES and path.parts[0] != "infra"
        for call in calls(tree)
        if touches_files(call)
    )
    assert {name: count for name, count in touching.items() if name not in TOUCH_FILES} == {}
    assert TOUCH_FILES.keys() - touching.keys() == set(), "no longer need to be named"


def test_public_classes_and_functions_have_docstrings() -> None:
    """Public classes of all packages, and functions of modules that users import."""
    silent = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in trees().items()
        if path.parts[0] in PACKAGES
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and path.as_posix().startswith(PUBLIC))
        if not node.name.startswith("_") and ast.get_docstring(node) is None
    ]
    assert silent == []


def test_files_named_by_pages_exist() -> None:
    """Names without suffix are checked, too. In "`lifecycle/offload.py`, `evict.py`", both are in one folder."""
    pages = [ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "README.md")]
    gone = []
    for page in (*pages, *(ROOT / "docs").rglob("*.md")):
        for named in re.findall(rf"`((?:{'|'.join(PACKAGES)}|bench|docs|tests)/[\w./-]*)`", page.read_text("utf-8")):
            if not (ROOT / named).exists() and not (ROOT / f"{named}.py").exists():
                gone.append(f"{page.name}: {named}")
    assert gone == []


def kinds_of_changes() -> dict[str, str]:
    """Return the titles of the kinds of changes, by the ending of a fragment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    return {kind["directory"]: kind["name"] for kind in project["tool"]["towncrier"]["type"]}


def test_changelog_entries_are_unique_and_ordered_by_kind() -> None:
    """Merges that keep both sides can duplicate or misplace entries."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert text.count("<!-- towncrier release notes start -->\n") == 1
    bullets = re.split(r"^- ", text, flags=re.MULTILINE)[1:]
    assert [one for one, count in Counter(one.split("\n\n")[0].strip() for one in bullets).items() if count > 1] == []
    for release in text.split("\n## ")[1:]:
        assert re.match(r"\d+\.\d+\.\d+ - (\d{4}-\d\d-\d\d|unreleased)\n", release)
        kinds = re.findall(r"^### (.+)$", release, re.MULTILINE)
        assert kinds == [
            kind for kind in ("Highlights", "Compatibility", *kinds_of_changes().values()) if kind in kinds
        ]
        assert "\n- " not in release.split("\n### ")[0]


def test_news_fragments_have_a_kind_and_one_short_sentence() -> None:
    readme = (ROOT / "changes" / "README.md").read_text("utf-8")
    assert re.findall(r"^\| `(\w+)` \|", readme, re.MULTILINE) == list(kinds_of_changes())
    for path in (ROOT / "changes").iterdir():
        if path.name == "README.md":
            continue
        named = re.fullmatch(r"\+[\w-]+\.(\w+)\.md", path.name)
        assert named, f"{path.name} is not +NAME.KIND.md"
        assert named[1] in kinds_of_changes(), path.name
        assert named[1] == "upgrade" or 0 < len(path.read_text("utf-8").split()) <= 25, path.name
