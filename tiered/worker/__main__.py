"""`python -m tiered.worker PRIORITY --fd N …`: a worker that gives way from its first instruction on.

The libraries start threads when they are imported, and these have what their process has at that moment. With its first
array pyarrow loads pandas, where that is installed, in case it is handed some of it: nearly half of what a start takes,
for nothing.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from typing_extensions import override

from infra.process.processor import take_priority


class _WithoutPandas(MetaPathFinder):
    """Its import fails, as where it is not installed."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "pandas":
            raise ModuleNotFoundError("not in this process", name=fullname)
        return None


def main() -> None:
    priority = sys.argv.pop(1)
    try:
        take_priority(priority)
    except OSError as error:
        sys.stderr.write(f"the tier worker runs at its broker's priority: {error}\n")
    sys.meta_path.insert(0, _WithoutPandas())
    from tiered.worker import process  # noqa: PLC0415 - see above

    process.main()


if __name__ == "__main__":
    main()
