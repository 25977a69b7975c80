"""Run one suite of the tests, and run tests that failed once more.

python -m tests.suite NAME PYTEST_ARGUMENT …           run the suite, and each failed test once more python -m
tests.suite --later NAME PYTEST_ARGUMENT …   run the suite only; failed tests are stored under NAME for python -m
tests.suite --again NAME …                   which runs the tests that those suites stored

Brokers, workers and JVMs depend on real time, and a machine may stall. A second try is meaningful only if nothing of
the first one is left: it runs in another process, with its own servers, after the other suites. At most four tests are
tried again; more failures cannot be explained by a stall. A test that fails twice has failed. Simulated tests are not
tried again, because their time follows from the seed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST_SECOND_TRIES = 4
_CACHES = Path(".pytest_cache", "suites")
_NEVER_AGAIN = "tests/simulation/"
_TESTS_FAILED = 1  # pytest's exit codes: 0 all passed, 1 tests failed; any other is not a test failure.


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
