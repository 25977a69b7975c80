"""A sync function for offset tables whose log is on the disk already, or is not part of the test."""


async def nothing_to_sync() -> None:
    pass
