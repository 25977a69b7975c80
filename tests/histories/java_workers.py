"""Stock Java clients at work, round by round, in one JVM: Workers.java, whose rows are recorded in a history."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self

from bench import jvm
from neve.record.ids import parse_offset_msg_id
from tests.histories.clients import RoundTopics
from tests.histories.history import Decision, Event, Outcome, Seen, Sent
from tests.interop.agent import FLAGS

_SOURCES = Path(__file__).parent / "java"
_ANSWER_S = 240.0  # A busy machine may give a JVM no processor time; that proves nothing.


class JavaWorkers:
    """Use it in `async with`."""

    def __init__(self, namesrv: str, home: Path) -> None:
        self._namesrv, self._home = namesrv, home
        self._history: list[Event] = []
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self.last_acknowledged: dict[str, int] = {}
        self.groups: dict[str, tuple[str, ...]] = {}

    async def __aenter__(self) -> Self:
        self._home.mkdir(parents=True, exist_ok=True)
        classes = await asyncio.to_thread(jvm.classes, _SOURCES)
        flags = [*FLAGS, f"-Drocketmq.home.dir={self._home}"]
        command = jvm.java(classes, "Workers", self._namesrv, home=self._home, flags=flags)
        with (self._home / "java.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log
            )
        self._rows = asyncio.create_task(self._read())
        try:
            await self._answer("READY")
        except BaseException:
            await self.__aexit__()  # No other process would end it.
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._rows

    @property
    def pid(self) -> int:
        return self._process.pid

    async def begin(self, topics: RoundTopics, name: str, seed: int, history: list[Event]) -> None:
        """Record the clients' actions in this history from now on."""
        self._history = history
        self.last_acknowledged = {}
        both = (topics.plain, topics.halves)
        self.groups = {f"{name}_java": both, f"{name}_java_order": (topics.plain,)}
        await self._ask("begin", topics.plain, topics.halves, name, seed)

    async def stop(self) -> None:
        """Wait until no send is in flight."""
        await self._ask("stop")

    async def end(self) -> None:
        """Leave the groups; nothing is sent, also if the round was aborted."""
        await self._ask("stop")
        await self._ask("end")

    async def _ask(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(("\t".join(map(str, words)) + "\n").encode())
        await self._process.stdin.drain()
        await self._answer(str(words[0]).upper())

    async def _answer(self, word: str) -> None:
        async with asyncio.timeout(_ANSWER_S):
            said = await self._answers.get()
        assert said == word, f"{said!r} instead of {word}\n{(self._home / 'java.log').read_text()[-3000:]}"

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            word, *row = line.decode().rstrip("\n").split("\t")
            if word == "SENT":
                self._sent(row)
            elif word == "SEEN":
                self._history.append(_seen(row))
            else:
                self._answers.put_nowait(word)
        self._answers.put_nowait("the JVM ended")

    def _sent(self, row: list[str]) -> None:
        producer, number, key, topic, began, ended, outcome, queue, offset, message_id, repeats, decision = row
        sent = Sent(
            producer=producer,
            number=int(number),
            key=key,
            topic=topic,
            began=int(began),
            ended=int(ended),
            outcome=Outcome(outcome),
            queue=int(queue),
            offset=int(offset),
            physical=parse_offset_msg_id(message_id)[2] if message_id else -1,
            may_repeat=repeats == "true",
            decision=Decision(decision),
        )
        self._history.append(sent)
        if sent.outcome is Outcome.ACKNOWLEDGED:
            self.last_acknowledged[producer] = sent.ended


def _seen(row: list[str]) -> Seen:
    who, group, topic, queue, offset, key, at, in_order, again = row
    return Seen(
        who=who,
        topic=topic,
        queue=int(queue),
        offset=int(offset),
        key=key,
        at=int(at),
        group=group,
        in_order=in_order == "true",
        again=again == "true",
    )
