"""`python -m tiered.worker PRIORITY --fd N …`: start a worker with a low priority from its first instruction on.

The priority is set before other imports, because imported libraries start threads, which inherit it. pyarrow loads
pandas, if installed, with its first array, to support pandas data. That takes nearly half of the start-up time and is
not needed here, so the import is blocked.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from typing_extensions import override

from infra.process.processor import take_priority


class _WithoutPandas(MetaPathFinder):
    """Makes the import of pandas fail, as if it were not installed."""

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
