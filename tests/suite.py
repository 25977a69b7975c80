"""Runs one suite of the tests, and what failed of it once more.

python -m tests.suite NAME PYTEST_ARGUMENT …           the suite, and each test that failed once more
python -m tests.suite --later NAME PYTEST_ARGUMENT …   the suite alone; what failed of it is kept under NAME for
python -m tests.suite --again NAME …                   which runs what those suites left

Brokers, workers and JVMs live by real time, and a machine may stall. A second try is worth something only where nothing
is left of the first: in another process, with servers of its own, when the other suites are through. There are four in
all; more failures than that are no stall. What fails twice has failed, and so has at once what is simulated: there time
does what the seed says.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST_SECOND_TRIES = 4
_CACHES = Path(".pytest_cache", "suites")
_NEVER_AGAIN = "tests/simulation/"
_TESTS_FAILED = 1  # pytest's exit codes: 0 all passed, 1 tests failed; anything else is no failure of a test


def main(arguments: list[str]) -> int:
    if arguments[0] == "--again":
        return _again(arguments[1:])
    if arguments[0] == "--later":
        return _first(arguments[1], arguments[2:])
    return _first(arguments[0], arguments[1:]) or _again(arguments[:1])


def _first(name: str, arguments: list[str]) -> int:
    _left(name).unlink(missing_ok=True)
    code = _pytest(name, arguments)
    if code != _TESTS_FAILED:
        return code
    failed = _failed(name)
    if not 0 < len(failed) <= MOST_SECOND_TRIES or any(test.startswith(_NEVER_AGAIN) for test in failed):
        return code
    _left(name).write_text(json.dumps(failed))
    print(f"{name}: {len(failed)} failed, and will be run once more: {' '.join(failed)}", flush=True)
    return 0


def _again(names: list[str]) -> int:
    failed = [test for name in names if _left(name).exists() for test in json.loads(_left(name).read_text())]
    if len(failed) > MOST_SECOND_TRIES:
        print(f"{len(failed)} tests failed, more than a second try is for: {' '.join(failed)}", flush=True)
        return _TESTS_FAILED
    codes = [_pytest("again", [test]) for test in failed]
    for test, code in zip(failed, codes, strict=True):
        print(f"second try {'passed' if code == 0 else 'FAILED'}: {test}", flush=True)
    return max(codes, default=0)


def _pytest(name: str, arguments: list[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={_CACHES / name}", "--cache-clear", *arguments]
    return subprocess.run(command, check=False).returncode


def _failed(name: str) -> list[str]:
    known = _CACHES / name / "v" / "cache" / "lastfailed"
    return sorted(json.loads(known.read_text())) if known.exists() else []


def _left(name: str) -> Path:
    _CACHES.mkdir(parents=True, exist_ok=True)
    return _CACHES / f"{name}.failed.json"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
