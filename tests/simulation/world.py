"""One seed is one history of a broker, its disk, its bucket and their faults; `run` plays it to the end."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from broker.config import BrokerConfig
from broker.store.errors import StoreError
from broker.tables.changes import CHANGES
from infra import failpoint
from infra.clock import ManualClock
from infra.failpoint import FailpointError
from infra.objects.store import ObjectStoreError
from infra.process.startup import StartupError
from lifecycle.erase import EraseRequest
from lifecycle.safe_clock import ClocksDisagree
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import CheckpointsDeleted, following, read_catalog
from neve.archive.format.journal import EntriesDeleted, anchor
from neve.errors import BrokerError
from neve.remoting.names import METADATA_LOG
from tests.kit.archive.catalog_state import state_of
from tests.kit.store.sim_disk import SimDisk
from tests.simulation import invariants, traffic
from tests.simulation.faulty_store import URL, FaultyStore
from tests.simulation.messaging import foreign
from tests.simulation.model import JournalModel, Message, StorageModel
from tests.simulation.process import BROKER, Killed, Process, make_environment, queues_of
from tests.simulation.workers import AnyWorker, InProcessWorker, Row, SimulatedWorker
from tiered.journal.errors import Fenced

TOPICS = ("orders", "payments", "%RETRY%group", "käse|1")
MINUTE, HOUR = 60_000, 3_600_000
SEGMENT = 32768
FAILPOINTS = (
    "journal.before_put", "journal.after_identity", "journal.after_packs", "journal.after_checkpoint",
    "offload.before_intent",
    "offload.after_intent", "offload.after_encode", "offload.after_upload", "offload.before_commit",
    "offload.after_commit", "offload.before_evict", "offload.after_evict", "state.before_put", "state.after_put",
    "store.allocate", "store.checkpoint", "store.evict", "store.flush", "store.roll", "ttl.after_delete",
    "ttl.after_expire", "compact.before_intent", "compact.after_intent", "compact.after_encode",
    "compact.after_upload", "compact.before_replace", "compact.after_replace", "compact.after_abort",
    "erase.before_hide",
    "journal.before_shortening", "journal.after_entry_deleted",
)  # fmt: skip
RESTORE_FAILPOINTS = (
    "restore.after_claim", "restore.after_epoch", "restore.after_plan", "restore.after_log", "restore.after_queues",
    "restore.after_tables", "restore.after_gaps", "journal.before_put", "store.checkpoint",
)  # fmt: skip
JOB_ERRORS = (ObjectStoreError, Fenced, ClocksDisagree, FailpointError, StoreError, BrokerError)
TOLD_STEPS = 60


class BrokenInvariant(AssertionError):
    """An invariant does not hold; the text has the seed and the history's last steps."""


@dataclasses.dataclass
class Backup:
    """A copy of the data directory that an operator may start."""

    disk: SimDisk
    log_uuid: str
    deletions: int


class StorageWorld:
    def __init__(self, seed: int, *, real_worker: bool = False) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.real_worker = real_worker
        self.clock = ManualClock(1_700_000_000_000 + self.random.randrange(86_400_000))
        self.bucket_store = FaultyStore(self.clock, seed)
        self.bucket_store.before_call = self._meanwhile
        self.bucket_store.deleting = self._deleting
        self.disk = SimDisk(seed=seed)
        self.config = self._make_config()
        self.model, self.bucket = StorageModel(), JournalModel(forgotten=self._forgotten)
        self.reader: Catalog | None = None  # A reader that resumes at its position from time to time.
        self.history: list[str] = []
        self.counts: Counter[str] = Counter()
        self.backups: list[Backup] = []
        self.deletions = 0
        self.ended: set[str] = set()  # The topics that the process knew when they were deleted.
        self.log_begin = 0
        # Topics with an incomplete deletion: their end offsets, and whether the archive had named any of them.
        self.unended: dict[str, tuple[dict[int, int], bool]] = {}
        self.missing: set[str] = set()  # Topics that an older copy did not have yet.
        self.fork_in = -1  # Requests until another process takes over in the middle of a job.
        self.alone = False  # The running process has no clients because it is superseded.
        self.unreadable = ""  # The topic whose queue files cannot be read.
        self.busy = False  # A job runs: others may act between its requests.
        self.decoded: dict[str, tuple[bytes, list[Row]]] = {}
        self.crowded = False
        self.process: Process
        self._machine = make_environment(self._make_worker, lambda: self.bucket_store, lambda: self.crowded)

    def _make_config(self) -> BrokerConfig:
        pick = self.random.choice
        return BrokerConfig(
            broker_name=BROKER,
            broker_ip1="127.0.0.1",
            bind_address="127.0.0.1",
            admin_port=-1,
            store_path_root_dir="/store",
            store_url=URL,
            mapped_file_size_commit_log=SEGMENT,
            flush_disk_type=pick(("SYNC_FLUSH", "ASYNC_FLUSH")),
            archive_min_bytes=pick((1, 3000, 1 << 20)),
            archive_max_age=pick((1000, MINUTE, HOUR)),
            file_reserved_time=pick((1, 3, 72)),
            expire_grace=pick((0, 10 * MINUTE, 5 * HOUR)),
            archive_replaced_grace=pick((0, MINUTE, HOUR)),
            default_ttl_hours=pick((-1, -1, 2, 24)),
            journal_checkpoint_entries=pick((2, 2, 5, 20, 256)),
            archive_journal_retention=pick((HOUR, HOUR, 6 * HOUR, 168 * HOUR)),
        )

    # ---- the whole history

    def run(self, steps: int = 120) -> None:
        """Play the whole history; raise Violation."""
        logging.disable(logging.CRITICAL)
        try:
            self._tell_all(steps)
        except BrokenInvariant:
            raise
        except Exception as error:
            told = "\n  ".join(self.history[-TOLD_STEPS:])
            text = f"seed {self.seed}: {type(error).__name__}: {error}\nthe last steps:\n  {told}"
            raise BrokenInvariant(text) from error
        finally:
            failpoint.disarm()
            logging.disable(logging.NOTSET)

    def _tell_all(self, steps: int) -> None:
        self._start()
        for _ in range(steps):
            self._step()
            self._observe()
        self._end()

    def _end(self) -> None:
        """Make everything reachable again, so that the archive becomes complete."""
        self.tell("end: all is well again")
        failpoint.disarm()
        self.bucket_store.heal()
        self.bucket_store.clock_offset_ms = 0
        if self.process.store.end.failure is not None:
            self._die("kill")
        self.process.pinned = None
        self._do("offload", lambda: self.process.lifecycle.offload.run(roll=True), must=True)
        self._do("evict", lambda: self.process.lifecycle.offload.run(roll=True, evict=True), must=True)
        self._do("ttl", self.process.lifecycle.expire.run, must=True)
        self._observe()
        invariants.check_as_a_stranger(self)
        assert not self.process.journal.catalog.rounds.open_intents(), "an intent stays open though nothing fails"
        self.check()
        self._die("power cut")
        self.check()

    # ---- steps

    def steps(self) -> dict[Callable[[], None], int]:
        """Return the possible steps with their relative frequency."""
        return {
            self._puts: 30, self._flush: 8, self._roll: 3, self._offload: 12, self._retention: 5, self._ttl: 6,
            self._change_ttl: 3, self._advance: 8, self._sweep: 2, self._checkpoint: 3, self._write_state: 3,
            self._delete_topic: 2, self._outage: 3, self._flaky: 3, self._skew: 2, self._arm: 4, self._crowd: 2,
            self._pin: 1, self._prepare: 2, self._power_off: 6,   self._back_up: 2,
            self._compact: 5, self._start_backup: 1, self._fork: 1, self._restore: 1,
            self._shorten: 4, self._forget: 2, self._bury: 2, self._read: 3, self._erase: 4, self._hide_erased: 2,
            self._foreign: 1, self._expire_credentials: 3, self._conflict: 2,
        }  # fmt: skip

    def _step(self) -> None:
        steps = self.steps()
        step = self.random.choices(list(steps), list(steps.values()))[0]
        self.counts[step.__name__] += 1
        try:
            step()
        except Killed as death:
            self.tell(f"  died: {death}")
            self._die(self.random.choice(("kill", "power cut")))
        if self.process.store.end.failure is not None:
            self.tell("  a sync failed: the broker ends")
            self._die("stop")

    def _puts(self) -> None:
        self._put_some(self.random.randrange(1, 9))

    def _put_some(self, count: int) -> None:
        for _ in range(count):
            topic = self.random.choices(TOPICS, (6, 3, 1, 1))[0]
            traffic.put(self, topic, self.random.randrange(3))

    def _flush(self) -> None:
        self._try("flush", self.process.flush)

    def _roll(self) -> None:
        self._try("roll", self.process.store.end.roll)

    def _prepare(self) -> None:
        self._try("prepare the next file", self.process.store.prepare_next)

    def _try(self, what: str, work: Callable[[], None]) -> None:
        self.tell(what)
        with contextlib.suppress(StoreError, FailpointError):
            work()

    def _offload(self) -> None:
        roll, evict = self.random.random() < 0.4, self.random.random() < 0.3
        self._do(f"offload roll={roll} evict={evict}", lambda: self.process.lifecycle.offload.run(roll, evict))

    def _retention(self) -> None:
        self._do("retention", self.process.lifecycle.evict.run)

    def _ttl(self) -> None:
        self._do("ttl", self.process.lifecycle.expire.run)

    def _compact(self) -> None:
        self._do("compact", self.process.lifecycle.compact.now)

    def _erase(self) -> None:
        """Erase like an operator; messages that the certificate names must not be returned from then on."""
        topic, grace_ms = self.random.choice(TOPICS), self.random.choice((None, None, 0))
        told: list[dict[str, Any]] = []
        covered = self.model.with_key(topic, traffic.ERASED_KEY)

        def erase() -> str:
            told.append(self.process.lifecycle.erase.now(EraseRequest(topic, traffic.ERASED_KEY, grace_ms=grace_ms)))
            return f"{told[0]['rows']} rows, complete: {told[0]['complete']}, {told[0]['not_erased']}"

        unreadable = self.random.choice(("never", "never", "at all", "while it hides"))
        if unreadable == "at all":
            self._fail_reads_of(topic)
        elif unreadable == "while it hides":
            failpoint.arm("erase.before_hide", self._fail_a_hide)
        try:
            self._do(f"erase from {topic}, grace {grace_ms}, queues unreadable: {unreadable}", erase)
        finally:
            self._fail_reads_of("")
            failpoint.disarm("erase.before_hide")
            failpoint.disarm("erase.look_at_queue")
        self._observe()
        for certificate in told:
            if any(" are not hidden: " in why for why in certificate["not_erased"]):
                self._hide_erased()  # The job that retries.
            rows = [(one["topic"], one["queue"], *span) for one in certificate["erased"] for span in one["offsets"]]
            places = {(topic, queue, at) for topic, queue, first, last in rows for at in range(first, last + 1)}
            # If another object has a row in view, the certificate reports that, unless the object expired meanwhile.
            minimums = self.bucket.minimums
            left = {place for place in places - self.bucket.erased if place[2] >= minimums.get(place[:2], 0)}
            assert not left or certificate["not_erased"], f"a certificate of {left}, which no entry says"
            self.model.certify(places & self.bucket.erased & self.model.given.keys())
            self.counts["rows erased"] += len(places)
            if certificate["complete"]:
                self.model.unreadable |= covered
                self.counts["messages covered"] += len(covered)
            else:
                self.counts["incomplete certificates"] += 1
            invariants.check_erased(self)

    def _fail_reads_of(self, topic: str) -> None:
        """Refuse each read of the files of a topic's queues; "" refuses none."""
        self.unreadable = topic
        self.disk.fail_read = lambda path: bool(self.unreadable) and f"/consumequeue/{topic}/" in str(path)

    def _fail_a_hide(self, _name: str) -> None:
        """Let one of the next queues to be hidden fail, as if its files were unreadable."""

        def fail(_name: str) -> None:
            self.counts["failed hides"] += 1
            raise OSError(errno.EIO, "injected")

        failpoint.arm("erase.look_at_queue", fail, self.random.choice((1, 1, 2, 3)))

    def _hide_erased(self) -> None:
        self._do("hide what was erased", self.process.lifecycle.hot_erasure.run)

    def _sweep(self) -> None:
        self._do("sweep", lambda: self.process.lifecycle.sweep.run(repair=True))

    def _checkpoint(self) -> None:
        self._do("checkpoint", self.process.lifecycle.checkpoint.run)

    def _shorten(self) -> None:
        before = self.process.lifecycle.shorten.deleted
        self._do("shorten", self.process.lifecycle.shorten.run)
        self.counts["entries deleted"] += self.process.lifecycle.shorten.deleted - before

    def _forget(self) -> None:
        self._do("forget", self.process.lifecycle.forget.run)

    def _bury(self) -> None:
        """Remove all remaining data of a deleted topic, and at last its name."""
        retention, grace = self.config.archive_journal_retention, self.config.expire_grace
        if self.random.random() < 0.5:
            self._delete_topic()
        self._ttl()
        self.clock.advance(retention + grace + HOUR)
        for job in (self._ttl, self._evict_all, self._forget):
            job()
            self._observe()

    def _evict_all(self) -> None:
        self._do("evict all", lambda: self.process.lifecycle.offload.run(roll=True, evict=True))

    def _read(self) -> None:
        """Read the archive, from its begin or from an earlier position; meanwhile the journal may be truncated."""
        shorter = [self.random.randrange(40)] if self.process.journal.ownership.online else []
        source = self.quiet_store()

        def meanwhile(verb: str, key: str) -> None:
            if shorter and not shorter[0]:
                shorter.clear()
                self._shorten()
            elif shorter:
                shorter[0] -= 1

        source.before_call = meanwhile
        if self.reader is None or self.random.random() < 0.3:
            self.tell("a reader begins")
            self.reader = None
        try:
            catalog = self.reader or read_catalog(source, BROKER, whole=self.random.random() < 0.5)
            for seq, entry, data in following(source, BROKER, "", catalog.next_seq, catalog.anchor):
                catalog.apply(seq, entry, anchor(data))
            state_of(catalog, BROKER)  # Each topic as of now: later none of its initial data may remain.
        except (EntriesDeleted, CheckpointsDeleted):
            self.tell("  a reader fell behind")
            self.counts["reader fell behind"] += 1
            catalog = read_catalog(source, BROKER, whole=True)
        source.before_call = lambda verb, key: None
        self.bucket.follow(self.bucket_store, BROKER)
        invariants.check_position(self, catalog)
        self.reader = catalog

    def quiet_store(self) -> FaultyStore:
        """Return the bucket without faults."""
        store = FaultyStore(self.clock, 0)
        store.objects = self.bucket_store.objects
        return store

    def _forgotten(self, topic: str) -> None:
        self.tell(f"  {topic} is forgotten")
        self.counts["names forgotten"] += 1
        self.ended.discard(topic)
        self.model.forget(topic, self._is_in_log)

    def _is_in_log(self, message: Message) -> bool:
        store = self.process.store
        if not store.min_physical_offset <= message.physical < store.max_physical_offset:
            return False
        file = store.log.at(message.physical)
        begin = message.physical - file.base if file is not None else 0
        return file is not None and bytes(file.map[begin : begin + len(message.record)]) == message.record

    def _write_state(self) -> None:
        self._do("state", self.process.write_state)

    def _do(self, what: str, job: Callable[[], Any], *, must: bool = False) -> None:
        """Run a job like the scheduler: a failure is reported, and the job is retried."""
        self.tell(what)
        self.busy = True
        try:
            result = job()
        except JOB_ERRORS as error:
            assert not must, f"{what} fails though nothing is wrong: {type(error).__name__}: {error}"
            self.tell(f"  failed: {type(error).__name__}: {error}")
        else:
            self.tell(f"  {_short(result)}")
        finally:
            self.busy = False

    def _change_ttl(self) -> None:
        topic, hours = self.random.choice(TOPICS), self.random.choice((1, 1, 2, 30, 1_000_000, -1))
        config = self.process.broker.topics.select(topic)
        if config is not None:
            self.tell(f"ttl of {topic} is {hours} h")
            changed = msgspec.structs.replace(config, attributes={**config.attributes, "reserve.time": str(hours)})
            try:
                self.process.broker.topics.update(changed)
            except (BrokerError, StoreError, FailpointError) as error:
                self.tell(f"  refused: {error}")
                return
            self.process.broker.topics.file.save_now()

    def _advance(self) -> None:
        by = self.random.choice((1000, MINUTE, 20 * MINUTE, HOUR, 3 * HOUR, 26 * HOUR))
        self.tell(f"{by} ms pass")
        self.clock.advance(by)

    def _delete_topic(self) -> None:
        topic = self.random.choice(TOPICS)
        if self.process.broker.topics.select(topic) is None:
            return
        queues = self.process.store.queues.names().get(topic, [])
        ends = {queue: self.process.store.queues.next_offset(topic, queue) for queue in queues}
        named = self.process.archive.tombstones.has_named(topic)
        self.tell(f"delete topic {topic}, named: {named}")
        self.deletions += 1
        try:
            self.process.drop_topic(topic)
        except (BrokerError, StoreError, FailpointError) as error:
            self.tell(f"  refused: {error}")
            self._not_ended(topic, ends, named=named)
        except BaseException:
            self._not_ended(topic, ends, named=named)
            raise
        else:
            self.unended.pop(topic, None)  # Follows a refused one.
            self.model.delete(topic, ends, again=not named)

    def _not_ended(self, topic: str, ends: dict[int, int], *, named: bool) -> None:
        """A tombstone may exist, whether or not the topic is gone; the next start decides."""
        if named:
            self.model.unsure(topic, ends)
        self.unended[topic] = ends, named

    def _end_deletions(self) -> None:
        """Complete deletions that reached the log, as a start does; other deletions have no effect.

        Queues of a deleted topic that the archive had not named begin again at 0, as after a completed deletion.
        """
        for topic, (ends, named) in self.unended.items():
            if self.process.broker.topics.select(topic) is None:
                store = self.process.store
                assert not store.queues.names_of(topic), f"topic {topic} is gone, its queues are not"
                again = not named and all(
                    store.queues.next_offset(topic, queue) < end for queue, end in ends.items() if end
                )
                self.tell(f"  {topic} is gone{' and begins again' if again else ''}")
                if again:
                    assert not self.process.archive.tombstones.has_named(topic), f"{topic} begins again, it was named"
                self.model.delete(topic, ends, again=again)
        self.unended.clear()

    def _outage(self) -> None:
        self.bucket_store.down = not self.bucket_store.down
        self.tell(f"the store is {'down' if self.bucket_store.down else 'up'}")

    def _flaky(self) -> None:
        self.bucket_store.failing = self.random.choice((0.0, 0.0, 0.1, 0.4))
        self.tell(f"of the requests {self.bucket_store.failing:.0%} fail")

    def _expire_credentials(self) -> None:
        """Refuse requests until the credentials are renewed; archiving then resumes without a restart."""
        self.bucket_store.expired = not self.bucket_store.expired
        self.tell(f"the store's credentials are {'expired' if self.bucket_store.expired else 'renewed'}")

    def _conflict(self) -> None:
        self.bucket_store.conflicting = self.random.choice((0.0, 0.2, 0.6))
        self.tell(f"of the conditional PUTs {self.bucket_store.conflicting:.0%} are answered with 409")

    def _skew(self) -> None:
        offset = self.random.choice((0, 0, -4 * MINUTE, 4 * MINUTE, -50 * HOUR, 50 * HOUR))
        self.bucket_store.clock_offset_ms = offset
        self.tell(f"the store's clock differs by {offset} ms")

    def _crowd(self) -> None:
        crowded = self.random.random() < 0.5
        self.crowded = crowded
        self.tell(f"crowded: {crowded}")

    def _pin(self) -> None:
        self.process.pinned = self.random.choice((None, self.random.randrange(max(1, self.model.log_end))))
        self.tell(f"pinned from {self.process.pinned}")

    def _arm(self) -> None:
        place, nth = self.random.choice(FAILPOINTS), self.random.randrange(1, 4)
        dies = self.random.random() < 0.6
        self.tell(f"armed: {place}:{nth} {'dies' if dies else 'fails'}")
        failpoint.arm(place, _die_at if dies else "error", nth)

    # ---- ends and starts

    def _foreign(self) -> None:
        """Write into the metadata log like a foreign master; the next start must execute none of it."""
        self.tell("a foreign master wrote into the metadata log")
        with contextlib.suppress(StoreError, FailpointError):
            for body in foreign.CHANGE_BODIES:
                self.process.store.put(
                    METADATA_LOG, CHANGES, body, b"", flag=0, sys_flag=0, born_timestamp=1, born_host=foreign.HOST
                )
        self._die("kill")

    def _power_off(self) -> None:
        self._die(self.random.choice(("power cut", "kill", "stop")))

    def _die(self, how: str) -> None:
        self.tell(how)
        self.fork_in = -1
        if how == "stop":
            try:
                self.process.stop()
            except (*JOB_ERRORS, OSError) as error:
                self.tell(f"  the stop failed: {error}")
            except Killed:
                self.tell("  died on the way")
            self.disk.kill()
        elif how == "kill":
            self.disk.kill()
        else:
            self.disk = self.disk.power_cut()
        failpoint.disarm()
        # After a kill the page cache still has everything.
        self._start(kept=self.model.promised_end if how == "power cut" else self.model.log_end)
        self.check()

    def _start(self, kept: int = 0, *, restore: bool = False, keep_names: bool = False) -> None:
        """Start the broker until it serves. `kept`: the log must reach at least this far."""
        while True:
            process = Process(self.disk, self.clock, self.config, self._machine, restore=restore)
            try:
                process.start(functools.partial(self._loaded, process, kept, keep_names=keep_names))
            except StartupError as error:
                self.tell(f"  no start: {error}")
                failing = self.bucket_store.is_faulty or "failpoint" in str(error)
                assert failing, f"the start was refused: {error}"
                failpoint.disarm()
                if self.random.random() < 0.5:
                    self.tell("  the store answers again")
                    self.bucket_store.heal()
            except FailpointError as error:
                self.tell(f"  the start failed: {error}")
                failpoint.disarm()
                self.disk.kill()
            except Killed as death:
                self.tell(f"  died in the start: {death}")
                self.disk = self.disk.power_cut() if self.random.random() < 0.5 else self.disk
                self.disk.kill()
                failpoint.disarm()
                root = self.config.root
                if restore and not self.disk.exists(root / "restore.json"):
                    restore = not self.disk.exists(root / "archive" / "identity.msgpack")
                    self.disk = SimDisk(seed=self.random.randrange(1 << 30)) if restore else self.disk
            else:
                break
        self.process = process
        self.model.log_end = max(self.model.log_end, process.store.max_physical_offset)
        self.model.promised_end = process.store.max_physical_offset
        state = "online" if process.journal.ownership.online else "offline"
        self.tell(f"started {state}, the log ends at {process.store.max_physical_offset}")
        self._end_deletions()

    def _loaded(self, process: Process, kept: int, *, keep_names: bool) -> None:
        """Check the state after the log's recovery and before the archive's attachment."""
        end = process.store.max_physical_offset
        assert end >= kept, f"the log ends at {end}, {kept} was promised"
        self.bucket.follow(self.bucket_store, BROKER)
        lost = self.model.lose(end, self.bucket, keep_names=keep_names)
        if lost:
            self.tell(f"  lost: {[message.number for message in lost]}")
        if not keep_names:
            self.model.log_end = max((m.end for m in self.model.messages()), default=0)

    def _back_up(self) -> None:
        self._flush()
        if self.process.store.end.failure is not None or not self.process.journal.ownership.online:
            return  # A copy from before the store was configured is rejected once its archive has advanced.
        self.tell("the data directory is copied")
        self.backups.append(Backup(self.disk.copy(), self.process.store.log_uuid, self.deletions))

    def _start_backup(self) -> None:
        """Start an older copy like an operator."""
        usable = [
            b for b in self.backups if b.deletions == self.deletions and b.log_uuid == self.process.store.log_uuid
        ]
        if not usable or self.bucket_store.is_faulty:
            return  # Without its bucket an older copy cannot know the offsets assigned since.
        backup = self.random.choice(usable)
        self.tell("an older copy of the data directory is started")
        # Later copies belong to another history from now on.
        del self.backups[self.backups.index(backup) + 1 :]
        self.disk = backup.disk.copy()
        failpoint.disarm()
        self.model.told = dict(self.bucket.minimums)
        self._start()
        self.missing = {topic for topic in TOPICS if self.process.broker.topics.select(topic) is None}
        self.check()

    def _fork(self) -> None:
        """Start another process with this broker's identity, at once or in the middle of a job."""
        if self.bucket_store.is_faulty or not self.process.journal.ownership.online:
            return
        self.fork_in = self.random.randrange(12)
        self.tell(f"another process will take over in {self.fork_in} requests")
        zombie = self.process
        self.random.choice((self._offload, self._offload, self._ttl, self._checkpoint, self._shorten, self._forget))()
        if self.process is zombie:
            self._take_over()
        self.fork_in = -1
        taken = len(self.bucket.entries)
        self.tell("the one that was superseded goes on")
        self.process, successor, self.alone = zombie, self.process, True
        for job in (
            self._offload,
            self._ttl,
            self._sweep,
            self._checkpoint,
            self._retention,
            self._shorten,
            self._forget,
        ):
            job()
        self.process, self.alone = successor, False
        self.bucket.follow(self.bucket_store, BROKER)
        assert len(self.bucket.entries) == taken, "a fenced writer appended to the journal"
        invariants.check_position(self, zombie.journal.catalog)
        self.check()

    def _take_over(self) -> None:
        self.fork_in, busy, self.busy = -1, self.busy, False
        failpoint.disarm()  # It was armed for the superseded process.
        zombie_disk = self.disk
        self.disk = zombie_disk.copy()
        self._start(kept=self.model.promised_end)
        assert self.process.journal.ownership.online
        if self.random.random() < 0.5:
            self._sleep_for_long()
        self.busy, self.alone = busy, busy
        self.bucket.follow(self.bucket_store, BROKER)

    def _sleep_for_long(self) -> None:
        """Let a superseded process sleep until the entries it knew have been deleted, if possible."""
        self.tell("  it sleeps for long")
        self.alone = False
        for _ in range(8):
            self._put_some(2)
            self._flush()
            for job in (self._offload_all, self._checkpoint):
                job()
                self._observe()
        self.clock.advance(self.config.archive_journal_retention + HOUR)
        for job in (self._write_state, self._offload_all, self._write_state, self._shorten):
            job()
            self._observe()

    def _offload_all(self) -> None:
        self._do("offload all", lambda: self.process.lifecycle.offload.run(roll=True))

    def _restore(self) -> None:
        """Restore on an empty disk from the bucket."""
        if self.bucket_store.is_faulty or not self.bucket.entries:
            return
        self.tell("restored from the bucket")
        self.disk = SimDisk(seed=self.random.randrange(1 << 30))
        failpoint.disarm()
        if self.random.random() < 0.5:
            place = self.random.choice(RESTORE_FAILPOINTS)
            self.tell(f"  dies at {place}")
            failpoint.arm(place, _die_at, self.random.randrange(1, 3))
        self._start(restore=True, keep_names=True)
        failpoint.disarm()
        # A queue that began after the last saved state, and is in no round, is unknown.
        self.model.forget_all_but(set(queues_of(self.process.store)))
        self.check()

    # ---- concurrent events

    def _meanwhile(self, verb: str, key: str) -> None:
        """Serve the broker's clients between two requests of a job."""
        if not self.busy or self.alone:
            return
        if self.fork_in >= 0:
            self.fork_in -= 1
            if self.fork_in < 0:
                self.tell("  meanwhile another process takes over")
                self._take_over()
                return
        if self.random.random() < 0.05 and not self.unreadable:
            self._put_some(self.random.randrange(1, 3))
        if self.random.random() < 0.02:
            self._flush()

    def _deleting(self, key: str) -> None:
        self.bucket.follow(self.bucket_store, BROKER)
        self.bucket.may_delete(key, min(self.clock.now_ms(), self.clock.now_ms() + self.bucket_store.clock_offset_ms))

    def _make_worker(self) -> AnyWorker:
        return self._worker_of(self.bucket_store)

    def _worker_of(self, store: FaultyStore) -> AnyWorker:
        kind = InProcessWorker if self.real_worker else SimulatedWorker
        return kind(self.disk, store, self._ending)

    def _ending(self, waiting: int) -> list[int]:
        """Complete uploads in any order, one or some at a time."""
        return self.random.sample(range(waiting), self.random.randrange(1, waiting + 1))

    # ---- invariants

    def _observe(self) -> None:
        """Record after each step the durable messages and the minimums that clients see."""
        self.bucket.follow(self.bucket_store, BROKER)
        self.model.erase(self.bucket.erased, traffic.ERASED_KEY.encode())
        self.model.promised_end = max(self.model.promised_end, self.process.store.visibility.flushed)
        if self.process.store.min_physical_offset != self.log_begin:
            self.log_begin = self.process.store.min_physical_offset
            self.model.evicted(self.log_begin, self.bucket, self._has_expired)
        ended = set(self.process.store.queues.records.deleted())
        for topic in sorted(self.ended - ended):
            if not self.bucket.knows(topic):  # No FORGET names a topic that no entry ever named.
                self._forgotten(topic)
        self.ended = ended
        for place, minimum in self.bucket.expired.items():
            self.model.record_minimum(place, minimum, self._has_expired)
        for place in queues_of(self.process.store):
            if self.process.broker.topics.select(place[0]) is not None:
                self.model.tell_minimum(place, self.process.told_minimum(*place), self.bucket, self._has_expired)

    def _has_expired(self, message: Message) -> bool:
        ttl = self.process.archive.policy().ttl_ms(message.topic)
        now = min(self.clock.now_ms(), self.clock.now_ms() + self.bucket_store.clock_offset_ms)
        return ttl is not None and message.stored_ms + ttl <= now

    def check(self) -> None:
        self._observe()
        invariants.check(self)

    def rows(self, key: str) -> list[Row]:
        """Return an object's rows; objects are immutable, so each is decoded once."""
        assert key in self.bucket_store.objects, f"{key} is in the catalog and not in the store"
        content = self.bucket_store.objects[key][0]
        known = self.decoded.get(key)
        if known is None:
            reader = self._worker_of(self.quiet_store())
            known = self.decoded[key] = (content, reader.rows(self.bucket.ever[key]))
        assert known[0] == content, f"{key} was modified"
        return known[1]

    def tell(self, what: str) -> None:
        self.history.append(f"{self.clock.now_ms()} {what}")


def _die_at(place: str) -> None:
    raise Killed(place)


def _short(result: object) -> str:
    return repr(result)[:160]
