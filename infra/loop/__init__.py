"""The event loop and the threads beside it: supervised tasks, work in slices, locks."""
