"""Which step is restored."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from everstep.core.groups import Layout
from everstep.core.placement import place
from everstep.core.restore import Choice, Copies, choose
from everstep.model import NO_STEP, Copy, Generation, MachineId, Published, Rank, Step, spans_of
from tests.core.test_placement import layouts


def copy(rank: int, step: int, generation: int = 1) -> Copy:
    return Copy(rank=Rank(rank), step=Step(step), generation=Generation(generation))


def published(step: int, generation: int = 1) -> Published:
    return Published(step=Step(step), generation=Generation(generation))


RANKS = [Rank(0), Rank(1)]
M2 = MachineId("m2")


def test_the_newest_step_that_every_rank_holds() -> None:
    local = (copy(0, 7), copy(0, 8), copy(0, 9), copy(1, 6), copy(1, 7), copy(1, 8))
    choice = choose(RANKS, Copies(local=local))
    assert (choice.copy, choice.local, choice.fetch, choice.disk) == (published(8), 2, (), 0)


def test_without_any_common_copy_training_starts_anew() -> None:
    choice = choose(RANKS, Copies(local=(copy(0, 7), copy(1, 6))))
    assert choice.copy.step == NO_STEP


def test_equal_steps_of_two_generations_do_not_belong_together() -> None:
    local = (copy(0, 8, 1), copy(1, 8, 2), copy(0, 5, 1), copy(1, 5, 1))
    assert choose(RANKS, Copies(local=local)).copy == published(5, 1)


def test_a_published_step_serves_ranks_without_memory() -> None:
    choice = choose(RANKS, Copies(local=(copy(0, 8), copy(0, 5)), published=(published(5),)))
    assert (choice.copy, choice.local, choice.disk) == (published(5), 1, 1)
    assert choice.why.endswith("complete copy: 1 in memory, 1 on disk")


def test_memory_that_is_newer_than_the_disk_wins() -> None:
    copies = Copies(local=(copy(0, 9), copy(1, 9)), published=(published(5),))
    assert choose(RANKS, copies).copy == published(9)


def test_a_peer_gives_what_the_lost_machine_had() -> None:
    copies = Copies(local=(copy(0, 8), copy(0, 9)), backups=((M2, copy(1, 8)),))
    choice = choose(RANKS, copies)
    assert (choice.copy, choice.local, choice.fetch) == (published(8), 1, ((1, M2),))
    assert choice.why.endswith("1 in memory, 1 in a peer's memory")


def test_own_memory_comes_before_a_peer_and_a_peer_before_the_disk() -> None:
    copies = Copies(
        local=(copy(0, 8),),
        backups=((M2, copy(0, 8)), (M2, copy(1, 8))),
        published=(published(8),),
    )
    choice = choose([Rank(0), Rank(1), Rank(2)], copies)
    assert (choice.local, choice.fetch, choice.disk) == (1, ((1, M2),), 1)


def test_a_machines_own_disk_comes_after_peers_and_before_what_all_share() -> None:
    copies = Copies(
        local=(copy(0, 8),),
        backups=((M2, copy(1, 8)),),
        local_disk=(copy(0, 8), copy(1, 8), copy(2, 8)),
        published=(published(8),),
    )
    choice = choose([Rank(rank) for rank in range(4)], copies)
    assert (choice.local, choice.fetch, choice.local_disk, choice.disk) == (1, ((1, M2),), 1, 1)
    where = "1 in memory, 1 in a peer's memory, 1 on the machine's own disk, 1 on disk"
    assert choice.why.endswith(where)


def test_machines_own_disks_are_enough_if_all_have_the_step() -> None:
    disks = (copy(0, 5), copy(1, 5), copy(0, 9), copy(1, 9, 2))
    choice = choose(RANKS, Copies(local_disk=disks))
    assert (choice.copy, choice.local_disk) == (published(5), 2)


Held = tuple[int, int, int]
HELD = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 2)), max_size=15)


@given(HELD, HELD, HELD, st.lists(st.tuples(st.integers(0, 5), st.integers(1, 2)), max_size=2))
def test_the_choice_is_complete_and_nothing_newer_is(
    held: list[Held],
    kept: list[Held],
    stored: list[Held],
    on_disk: list[tuple[int, int]],
) -> None:
    ranks = [Rank(0), Rank(1), Rank(2)]
    copies = Copies(
        local=tuple(copy(*entry) for entry in held),
        backups=tuple((M2, copy(*entry)) for entry in kept),
        local_disk=tuple(copy(*entry) for entry in stored),
        published=tuple(published(*entry) for entry in on_disk),
    )
    anywhere = {*copies.local, *(each for _, each in copies.backups), *copies.local_disk}

    def complete(step: int, generation: int) -> bool:
        everywhere = all(copy(rank, step, generation) in anywhere for rank in ranks)
        return published(step, generation) in copies.published or everywhere

    choice = choose(ranks, copies)
    candidates = [pair for pair in itertools.product(range(6), (1, 2)) if complete(*pair)]
    assert (choice.copy.step, choice.copy.generation) == max(candidates, default=(-1, 0))
    if choice.copy.step > NO_STEP:
        near = choice.local + len(choice.fetch) + choice.local_disk
        assert near + choice.disk == len(ranks)
        assert choice.disk == 0 or choice.copy in copies.published


# --- parts ---------------------------------------------------------------------------------------

M0, M1 = MachineId("m0"), MachineId("m1")


def part(rank: int, step: int, *replicas: int) -> Copy:
    alike = spans_of(map(Rank, replicas))
    return Copy(rank=Rank(rank), step=Step(step), generation=Generation(1), replicas=alike)


def three(step: int = 8) -> Copies:
    """Ranks 0 and 1 on m0 and m1; rank 2's machine is lost, m0 keeps its backup, m1 that of 0."""
    return Copies(
        local=(copy(0, step), copy(1, step)),
        backups=((M1, part(0, step, 0, 1, 2)), (M0, part(2, step, 0, 1, 2))),
        homes=((Rank(0), M0), (Rank(1), M1)),
        compared=(published(step),),
    )


ALL = [Rank(0), Rank(1), Rank(2)]


def test_a_part_is_joined_with_the_slices_of_ranks_that_have_them_in_memory() -> None:
    choice = choose(ALL, three())
    assert (choice.copy, choice.local, choice.fetch) == (published(8), 2, ((2, M0),))
    assert choice.joins == {2: ((0, M0), (1, M1), (2, M0))}


def test_a_rank_whose_machine_is_lost_gives_its_slice_from_its_own_backup() -> None:
    backups = ((M1, part(0, 8, 0, 1, 2)), (M1, part(2, 8, 0, 1, 2)))
    copies = replace(three(), local=(copy(1, 8),), backups=backups, homes=((Rank(1), M1),))
    choice = choose(ALL, copies)
    assert choice.fetch == ((0, M1), (2, M1))
    assert choice.joins == dict.fromkeys((0, 2), ((0, M1), (1, M1), (2, M1)))


def test_a_part_is_worth_nothing_without_every_slice_or_before_replicas_were_compared() -> None:
    for changed in (
        {"compared": ()},
        {"homes": ((Rank(0), M0),)},
        {"compared": (published(8, 2),)},
    ):
        choice = choose(ALL, replace(three(), **changed))
        assert (choice.copy.step, choice.fetch, choice.joins) == (NO_STEP, (), {})
    older = replace(three(), backups=(*three().backups, (M0, copy(2, 8))), compared=())
    assert choose(ALL, older).fetch == ((2, M0),)
    assert choose(ALL, older).joins == {}


def replica_sets(layout: Layout, dimensions: tuple[str, ...]) -> dict[Rank, set[Rank]]:
    """What a rank holds alike with the others of its groups in these dimensions."""
    alike = {Rank(rank): {Rank(rank)} for rank in range(layout.world_size)}
    for name, group in layout.groups():
        for rank in group if name in dimensions else ():
            alike[rank] |= set(group)
    return {rank: ranks if len(ranks) > 1 else set() for rank, ranks in alike.items()}


def after_loss(layout: Layout, lost: frozenset[int], alike: dict[Rank, set[Rank]]) -> Choice:
    """What is chosen when these machines are gone, and newcomers have their positions."""
    names = [MachineId(f"m{n}") for n in range(layout.machines)]
    ranks = [Rank(rank) for rank in range(layout.world_size)]
    well = [rank for rank in ranks if layout.machine(rank) not in lost]
    peers = place(layout).peers
    kept = [rank for rank in ranks if layout.machine(peers[rank]) not in lost]
    return choose(
        ranks,
        Copies(
            local=tuple(copy(rank, 8) for rank in well),
            backups=tuple(
                (names[layout.machine(peers[rank])], part(rank, 8, *sorted(alike[rank])))
                for rank in kept
            ),
            homes=tuple((rank, names[layout.machine(rank)]) for rank in well),
            compared=(published(8),),
        ),
    )


def test_whatever_placement_covers_may_be_lost_although_peers_keep_only_parts() -> None:
    """Every slice lies on two machines as every shard did: with its owner and with its peer."""
    lost_ranks = 0
    shares = itertools.cycle((("dp",), ("dp", "tp"), ("tp", "cp"), ("pp",)))
    for layout, dimensions in zip(layouts()[::23], shares, strict=False):
        placement = place(layout)
        alike = replica_sets(layout, dimensions)
        covered = [
            layout.machines_of(group)
            for name, group in layout.groups()
            if name not in placement.uncovered
        ]
        singles = [frozenset({machine}) for machine in range(layout.machines)]
        for lost in {*singles[:4], *covered[:6]}:
            choice = after_loss(layout, lost, alike)
            assert choice.copy == published(8), (layout, lost)
            lost_ranks += len(choice.fetch)
            for rank, sources in choice.joins.items():
                assert {other for other, _ in sources} == alike[rank]
                assert not {name for _, name in sources} & {f"m{machine}" for machine in lost}
    assert lost_ranks > 1000
