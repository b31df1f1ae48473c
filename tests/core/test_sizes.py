"""Other sizes of a job: which fit, who sits where, and whose shard each rank goes on with."""

from __future__ import annotations

import pytest

from everstep.core.regrown import Sources, Taken, best_of, take_all
from everstep.core.sizes import Size, alike, largest, replica, seats
from everstep.model import (
    CheckpointSpec,
    ElasticSpec,
    Generation,
    JobId,
    JobSpec,
    LayoutSpec,
    MachineId,
    NodeRank,
    Published,
    Rank,
    Step,
)


def job(nnodes: int, nproc: int, layout: LayoutSpec | None = None, dp_min: int = 1) -> JobSpec:
    return JobSpec(
        job=JobId("job"),
        uid="00000000",
        command=("train.py",),
        working_dir="/",
        nnodes=nnodes,
        nproc_per_node=nproc,
        checkpoint=CheckpointSpec(directory="/checkpoints"),
        layout=layout,
        elastic=ElasticSpec(dp_min=dp_min),
    )


WIDE = LayoutSpec(tp=2, dp=4, pp=2)
"""16 ranks: with 4 on a machine, each has two replicas of one stage."""


@pytest.mark.parametrize(
    ("spec", "machines", "size"),
    [
        (job(3, 1), 2, Size(nnodes=2, dp=2)),
        (job(3, 1), 5, Size(nnodes=3, dp=3)),
        (job(3, 1, dp_min=2), 1, None),
        (job(3, 1), 0, None),
        # Ranks of a machine are all used: of two on each, none is left over.
        (job(3, 2), 2, Size(nnodes=2, dp=4)),
        # A machine may have ranks of two stages then.
        (job(4, 4, WIDE), 3, Size(nnodes=3, dp=3)),
        (job(4, 4, WIDE), 1, Size(nnodes=1, dp=1)),
        (job(4, 4, WIDE, dp_min=2), 1, None),
        # A replica of eight ranks needs two machines.
        (job(8, 4, LayoutSpec(tp=8, dp=4)), 7, Size(nnodes=6, dp=3)),
    ],
)
def test_the_most_replicas_that_fill_machines(
    spec: JobSpec, machines: int, size: Size | None
) -> None:
    assert largest(spec, machines) == size


def test_ranks_are_alike_if_they_differ_in_their_replica_alone() -> None:
    full = job(4, 4, WIDE)
    small = full.resized(2, 2)
    assert small.world_size == 8
    # tp varies fastest, then dp, then pp: rank 5 of 8 is tp=1, dp=0, pp=1.
    assert alike(small, full)[Rank(5)] == (9, 11, 13, 15)
    assert alike(full, small)[Rank(15)] == (5, 7)
    assert [replica(full, Rank(rank)) for rank in (0, 1, 2, 7, 8, 10)] == [0, 0, 1, 3, 0, 1]


def at(**names: int) -> dict[NodeRank, MachineId]:
    return {NodeRank(node_rank): MachineId(name) for name, node_rank in names.items()}


def test_machines_stay_with_the_ranks_that_they_have() -> None:
    full = job(4, 1, LayoutSpec(dp=2, pp=2))  # m0 and m1 are stage 0, m2 and m3 stage 1
    small = full.resized(2, 1)
    assert seats(small, full, at(m1=1, m2=2, m3=3)) == at(m1=0, m2=1)
    assert seats(small, full, at(m2=2, m3=3)) == at(m2=1, m3=0), "the only ones that are left"
    assert seats(full, small, at(m1=0, m2=1)) == at(m1=0, m2=2), "one of each stage is wanted"


HERE = {Rank(0): MachineId("m0"), Rank(1): MachineId("m1")}
FULL, SMALL = job(3, 1), job(3, 1).resized(2, 2)


def own(**ranks: int) -> dict[Rank, list[MachineId]]:
    return {Rank(rank): [MachineId(name)] for name, rank in ranks.items()}


def taken(sources: Sources) -> list[tuple[int, str | None]] | None:
    found = take_all(SMALL, FULL, HERE, sources)
    return None if found is None else [(each.rank, each.machine) for each in found.values()]


def test_a_rank_goes_on_with_what_lies_on_its_machine() -> None:
    assert taken(Sources(own=own(m0=2, m1=0))) == [(2, "m0"), (0, "m1")]


def test_as_many_different_shards_as_there_are() -> None:
    everywhere = {Rank(0): [MachineId("m0"), MachineId("m1")]}
    kept = {Rank(1): [MachineId("m0")]}
    assert taken(Sources(own=everywhere, kept=kept)) == [(0, "m0"), (1, "m0")]
    assert taken(Sources(own=everywhere)) == [(0, "m0"), (0, "m1")], "else two get the same"
    assert taken(Sources(own=everywhere, published=True)) == [(0, "m0"), (1, None)]


def test_a_part_is_of_use_with_all_slices() -> None:
    everybody: tuple[Rank, ...] = (Rank(0), Rank(1), Rank(2))
    part = {Rank(1): [(MachineId("m0"), everybody)]}
    assert take_all(SMALL, FULL, HERE, Sources(parts=part)) is None
    found = take_all(SMALL, FULL, HERE, Sources(parts=part, own=own(m1=2, m5=0)))
    assert found is not None
    assert found[Rank(0)] == Taken(Rank(0), MachineId("m5")), "a whole one is nearer"
    only = take_all(SMALL.resized(1, 1), FULL, {}, Sources(parts=part, own=own(m1=2)))
    assert only == {Rank(0): Taken(Rank(2), MachineId("m1"))}
    assert take_all(SMALL, FULL, HERE, Sources()) is None


def key(step: int) -> Published:
    return Published(step=Step(step), generation=Generation(1))


def shards(*ranks: int) -> dict[Rank, Taken]:
    return {Rank(new): Taken(Rank(old), MachineId("m0")) for new, old in enumerate(ranks)}


def test_two_steps_less_are_better_than_one_replica_twice() -> None:
    found = {key(9): shards(0, 0), key(8): shards(0, 0), key(7): shards(0, 2)}
    assert best_of(found) == key(7)
    assert best_of({key(10): shards(0, 0), **found}) == key(10), "but three are not"
