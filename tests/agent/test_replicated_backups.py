"""Backups of ranks that hold the same: slices go to peers, and come together on a newcomer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from everstep.actions import StartRanks
from everstep.agent.fetching import NotFetched
from everstep.agent.transfer import client
from everstep.checkpoint import slots
from everstep.checkpoint.format import PAGE, Expected
from everstep.checkpoint.slots import ShardWriter, slot_path
from everstep.core.replicas import differing
from everstep.events import StepBackedUp
from everstep.model import Copy, Rank, Step, ranks_in
from everstep.paths import kept_shm, rank_shm
from tests.agent.test_backing_up import GENERATION, Host, Hosts
from tests.checkpoint.payloads import payload_of
from tests.checkpoint.plain import digest

RANKS = tuple(map(Rank, range(4)))
SHARED = 200_000
OWN = 3000
STEP = Step(10)


def state(rank: Rank) -> memoryview:
    """All ranks hold the same 200 kB, and each some of its own."""
    return payload_of(rank, [(SHARED, 0)], OWN, replicas=RANKS)


def save(host: Host, states: Sequence[memoryview]) -> None:
    for rank, payload in zip(host.ranks, states, strict=True):
        writer = ShardWriter(host.here.shm, host.writer(rank))
        writer.reserve(len(payload))
        slot = writer.begin(STEP, len(payload))
        slot.payload[:] = payload
        writer.commit(slot, digest(bytes(payload)))


def back_up(host: Host, to: Host, whole: str = "") -> StepBackedUp:
    order = replace(host.order(STEP, to), whole=whole)
    answer = asyncio.run(host.shards.back_up(order))
    assert isinstance(answer, StepBackedUp), answer
    return answer


class Pair:
    """Two machines with two ranks each, and backups of all four."""

    def __init__(self, root: Path) -> None:
        self.hosts = Hosts(root)
        self.m0, self.m1 = self.hosts.host("m0", 0), self.hosts.host("m1", 1)
        self.states = {rank: state(rank) for rank in RANKS}
        save(self.m0, [self.states[rank] for rank in self.m0.ranks])
        save(self.m1, [self.states[rank] for rank in self.m1.ranks])
        self.told = [back_up(self.m0, self.m1), back_up(self.m1, self.m0)]

    def lose_m0(self) -> tuple[Host, StartRanks]:
        """A newcomer takes its position, and is told where all is."""
        self.m0.shards.close()
        newcomer = self.hosts.host("m2", 0)
        order = newcomer.restore_order(STEP, self.m1)
        return newcomer, replace(order, slices=tuple(self.m1.peer(rank) for rank in RANKS))

    def restored(self, host: Host) -> list[bool]:
        """For each rank of the newcomer, whether its slot is what the lost machine had."""
        return [
            slots.find(host.here.shm, Expected(step=STEP, rank=rank)).payload == self.states[rank]
            for rank in host.ranks
        ]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(client, "RETRY_AFTER_S", (0.01,))
    made = Pair(tmp_path)
    yield made
    made.hosts.end()


def test_each_machine_sends_its_slices_and_says_what_they_are_slices_of(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = 4 * len(pair.states[Rank(0)])
    sent = sum(answer.sent_bytes for answer in pair.told)
    assert SHARED + 4 * OWN < sent < whole / 2
    assert not differing(each for answer in pair.told for each in answer.replicated)
    (first, second) = pair.m1.shards.backups()
    assert (first.rank, second.rank) == (0, 1)
    assert list(ranks_in(first.replicas)) == list(RANKS)


def test_a_newcomer_joins_its_parts_with_slices_of_live_ranks_and_of_backups(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    newcomer, order = pair.lose_m0()
    capsys.readouterr()
    newcomer.make_ready(order)
    assert pair.restored(newcomer) == [True, True]
    headers = [slots.headers_in(rank_shm(newcomer.here.shm, rank)) for rank in newcomer.ranks]
    assert [h.digest for found in headers for h in found.values()] == [
        digest(bytes(pair.states[rank])) for rank in newcomer.ranks
    ]
    assert "fetched 2 shards of step 10, 4" in capsys.readouterr().out  # of 2 x 200 kB


def test_a_whole_backup_among_parts_is_taken_as_it_is(pair: Pair) -> None:
    back_up(pair.m0, pair.m1, whole="a test")
    newcomer, order = pair.lose_m0()
    newcomer.make_ready(order)
    assert pair.restored(newcomer) == [True, True]
    newcomer.make_ready(replace(order, slices=()))
    assert pair.restored(newcomer) == [True, True]


def test_why_shards_are_whole_is_told_once(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    answers = [back_up(pair.m0, pair.m1, whole="ranks 0 and 1 differ") for _ in range(2)]
    assert [answer.replicated for answer in answers] == [(), ()]
    assert pair.m1.shards.backups() == tuple(
        Copy(rank=Rank(rank), step=STEP, generation=GENERATION) for rank in (0, 1)
    )
    assert capsys.readouterr().out.count("whole to peers from now on: ranks 0 and 1 differ") == 1


def test_what_differs_on_one_replica_is_told(pair: Pair) -> None:
    other = pair.states[Rank(3)]
    other[-1] ^= 1
    save(pair.m1, [pair.states[Rank(2)], other])
    told = [*pair.told[0].replicated, *back_up(pair.m1, pair.m0).replicated]
    assert "ranks 0 and 3 do not hold the same" in differing(told)


def test_a_slice_that_nobody_has_fails_the_start_with_a_sentence(pair: Pair) -> None:
    newcomer, order = pair.lose_m0()
    with pytest.raises(NotFetched, match="nobody was named who has the slices of rank 3"):
        newcomer.make_ready(replace(order, slices=order.slices[:3]))
    slots.drop_step(pair.m1.here.shm, Rank(2), STEP)
    with pytest.raises(NotFetched, match=r"m1 at .* rank 2 holds no complete copy of step 10"):
        newcomer.make_ready(order)
    assert newcomer.held() == [[], []]


def test_a_damaged_backup_gives_no_slices_and_is_not_offered_again(pair: Pair) -> None:
    directory = rank_shm(kept_shm(pair.m1.here.shm), Rank(1))
    ((index, header),) = slots.headers_in(directory).items()
    with slot_path(directory, index).open("r+b") as file:
        at = PAGE + header.payload_bytes - 1  # the last byte of its slice
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    newcomer, order = pair.lose_m0()
    only_first = replace(order, fetch=order.fetch[:1])
    with pytest.raises(NotFetched, match=r"rank-1/slot-. is damaged"):
        newcomer.make_ready(only_first)
    assert [copy.rank for copy in pair.m1.shards.backups()] == [0]


def test_peers_reserve_for_parts_and_no_more(pair: Pair) -> None:
    own = sum(p.stat().st_size for p in pair.m0.here.shm.glob("rank-0/slot-*"))
    kept = sum(p.stat().st_size for p in pair.m0.here.shm.glob("backup/rank-2/slot-*"))
    assert own > 5 * SHARED
    assert kept < own / 3
