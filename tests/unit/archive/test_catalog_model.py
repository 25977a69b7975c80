"""Comparison of a catalog with a plain list of names over random histories and queries."""

from __future__ import annotations

from random import Random

import pytest

from neve.archive.catalog.catalog import Catalog, GapHit, Location
from neve.archive.catalog.name_blocks import NAMES_MAX, Block, blocks_of
from neve.archive.catalog.topic_catalog import LAID_WHEN_ASKED
from neve.archive.format.journal import AnyEntry, Commit, CommittedObject, Deleted, Expire, Replace, Unexpire
from tests.kit.archive.catalog_state import expiring_keys, state_of
from tests.kit.archive.checkpoints import restored
from tests.kit.archive.random_objects import QUEUES, STEP, name_of

TOPICS = ("orders", "%RETRY%" + "%" * 120, "a.b")


class CatalogModel:
    """A model of the catalog with names in lists."""

    def __init__(self) -> None:
        self.live: dict[str, CommittedObject] = {}
        self.expiring: dict[str, tuple[CommittedObject, int]] = {}
        self.minimums: dict[tuple[str, int], int] = {}

    def find(self, topic: str, queue: int, offset: int) -> tuple[str, int, int] | None:
        if offset < self.minimums.get((topic, queue), 0):
            return None
        for name in self.live.values():
            for of, first, last in name.runs if name.topic == topic else ():
                if of == queue and first <= offset <= last:
                    return name.key, first, last
        return None

    def objects(self, topic: str) -> list[CommittedObject]:
        return sorted((name for name in self.live.values() if name.topic == topic), key=lambda name: name.start)

    def expire(self, keys: list[str], after: int) -> None:
        for key in keys:
            name = self.live.pop(key)
            self.expiring[key] = name, after
            for queue, (_, last, _) in name.queues.items():
                if not any(queue in one.queues for one in self.objects(name.topic)):
                    at = name.topic, queue
                    self.minimums[at] = max(self.minimums.get(at, 0), last + 1)


@pytest.mark.parametrize("laid", [0, 4, LAID_WHEN_ASKED])
@pytest.mark.parametrize("seed", range(6))
def test_catalog_equals_plain_list_model_for_random_histories(
    seed: int, laid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neve.archive.catalog.topic_catalog.LAID_WHEN_ASKED", laid)
    random = Random(seed)
    model, catalog = CatalogModel(), Catalog()
    following = dict.fromkeys(TOPICS, 0)
    skipped: list[tuple[str, int]] = []
    gone: list[CommittedObject] = []
    replaced: set[str] = set()
    for step in range(60):
        entry: AnyEntry
        match random.choice(
            ("commit", "commit", "commit", "late", "expire", "unexpire", "deleted", "replace", "again")
        ):
            case "commit":
                names = []
                for topic in random.choices(TOPICS, k=random.choice((1, 2, NAMES_MAX))):
                    if random.random() < 0.1:
                        skipped.append((topic, following[topic]))
                    else:
                        names.append(name_of(random, topic, following[topic]))
                    following[topic] += 1
                entry = Commit(round=step, names=names)
                model.live |= {name.key: name for name in names}
            case "late" if skipped:
                names = [name_of(random, *skipped.pop(random.randrange(len(skipped))))]
                entry = Commit(round=step, names=names)
                model.live |= {name.key: name for name in names}
            case "again" if model.live:
                entry = Commit(round=step, names=random.sample(list(model.live.values()), 1))
            case "expire" if model.live:
                topic = random.choice(TOPICS)
                of = model.objects(topic)
                oldest = of[: random.randrange(len(of) + 1)]
                keys = [name.key for name in random.choice((oldest, random.sample(of, min(3, len(of)))))]
                entry = Expire(keys=[*keys, "never heard of"], delete_after_ms=step)
                model.expire(keys, step)
            case "unexpire" if expired := sorted(model.expiring.keys() - replaced):
                keys = random.sample(expired, random.randrange(1, len(expired) + 1))
                entry = Unexpire(keys=keys, minimums={topic: dict.fromkeys(range(QUEUES), 0) for topic in TOPICS})
                model.live |= {key: model.expiring.pop(key)[0] for key in keys}
                model.minimums = {}
            case "deleted" if model.expiring:
                keys = random.sample(sorted(model.expiring), random.randrange(1, len(model.expiring) + 1))
                entry = Deleted(keys=keys)
                gone += [model.expiring.pop(key)[0] for key in keys]
            case "replace" if model.live:
                topic = random.choice([name.topic for name in model.live.values()])
                of = model.objects(topic)
                at = random.randrange(len(of))
                old = of[at : at + 1]
                while len(old) < 5 and at + len(old) < len(of) and of[at + len(old)].start == old[-1].end:
                    old.append(of[at + len(old)])
                replaced |= {name.key for name in old}
                first, last = old[0].start // 100, old[-1].end // 100
                new = name_of(random, topic, first, rewrite=step + 1, count=last - first)
                entry = Replace(old=[name.key for name in old], new=[new], delete_after_ms=step)
                for name in old:
                    model.expiring[name.key] = model.live.pop(name.key), step
                model.live[new.key] = new
            case _:
                continue
        catalog.apply(catalog.next_seq, entry)
        check(random, model, catalog, following, gone)
    again = restored(catalog)
    check(random, model, again, following, gone)
    assert state_of(again) == state_of(catalog)


def check(
    random: Random, model: CatalogModel, catalog: Catalog, following: dict[str, int], gone: list[CommittedObject]
) -> None:
    assert catalog.object_count == len(model.live)
    assert expiring_keys(catalog) == {key: after for key, (_, after) in model.expiring.items()}
    assert all(catalog.knows(key) for key in random.sample([*model.live, *model.expiring], min(3, len(model.live))))
    assert not any(catalog.knows(name.key) for name in gone[-3:])
    for topic in TOPICS:
        of = model.objects(topic)
        assert catalog.objects(topic) == of
        held = catalog._topics.get(topic)
        assert held is None or all(block.count for block in held.blocks)
        place = random.randrange(following[topic] * 100 + 1)
        assert sorted(name.key for name in catalog.objects_at(place) if name.topic == topic) == sorted(
            name.key for name in of if name.start <= place < name.end
        )
        for queue in range(QUEUES):
            assert catalog.recorded_minimum(topic, queue) == model.minimums.get((topic, queue), 0)
            for _ in range(5):
                offset = random.randrange(following[topic] * STEP * 3 + 1)
                found = catalog.find(topic, queue, offset)
                assert not isinstance(found, GapHit)
                wanted = model.find(topic, queue, offset)
                if wanted is None:
                    assert found is None
                else:
                    assert isinstance(found, Location)
                    assert found.first <= offset <= found.last
            runs = [(first, last) for name in of for one, first, last in name.runs if one == queue]
            assert [(run.first, run.last) for run in catalog.queue(topic, queue).runs()] == sorted(runs)
            assert catalog.max_offset(topic, queue) == max((last + 1 for _, last in runs), default=None)
            minimum = model.minimums.get((topic, queue), 0)
            lowest = min((max(first, minimum) for first, last in runs if last >= minimum), default=None)
            assert catalog.min_offset(topic, queue) == lowest


@pytest.mark.parametrize("count", [1, NAMES_MAX - 1, NAMES_MAX, NAMES_MAX * 3 + 5])
def test_blocks_return_their_names_unchanged(count: int) -> None:
    random = Random(count)
    names = [name_of(random, TOPICS[0], number) for number in range(count)]
    blocks = blocks_of(TOPICS[0], names)
    assert [name for block in blocks for name in block.names()] == names
    assert len(blocks) >= -(-count // NAMES_MAX)
    assert all(isinstance(block, Block) and block.codec for block in blocks)
