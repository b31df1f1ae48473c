"""Looks at stacks, and what they mean: the paper's figure, kinds of hangs, their look-alikes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.core.aggregate import Conclusion, agree, conclude, flagged
from everstep.core.group_of import machines_named
from everstep.diagnosis.standing import Call, Peer
from everstep.looks import LookResult, Posture, Role, in_words, ranges_of
from everstep.model import NodeRank, Rank
from tests.core.shown import PLACES, layout, posture, stood, taken, worker

FIGURE_7 = layout(2, "tp cp pp dp", tp=2, pp=4, dp=4)
"""32 ranks on 16 machines; machine = dp * 4 + pp."""
WAIT = dict.fromkeys(range(8), "all_reduce")
Showing = Mapping[int, "str | Posture"]


def figure_7() -> dict[int, str | Posture]:
    return {
        **dict.fromkeys(range(24), "reduce_scatter"),
        **dict.fromkeys(range(24, 28), "irecv"),
        **dict.fromkeys(range(28, 30), "isend"),
        **dict.fromkeys(range(30, 32), "all_gather"),
    }


def of(showing: Showing, **more: Any) -> Conclusion:
    """What a look at machines of two ranks means."""
    more.setdefault("ranks_per_machine", 2)
    return conclude(taken(showing, **more))


def apart(found: Conclusion, ranks_per_machine: int = 2) -> tuple[int, ...]:
    """The machines of the ranks that are named."""
    return tuple(sorted({rank // ranks_per_machine for rank in found.ranks}))


def machines(found: Conclusion) -> tuple[int, ...]:
    assert (found.result is LookResult.MACHINES) == bool(found.machines)
    return tuple(map(int, found.machines))


# --- the paper's cases ----------------------------------------------------------------------------


def test_figure_7_of_the_paper() -> None:
    found = of(figure_7(), layout=FIGURE_7)
    assert machines(found) == (12, 13, 14, 15)
    assert found.group == "pp 24-31"
    assert apart(found) == machines(found)
    assert "24 of 32 ranks elsewhere" in found.why


def test_figure_7_where_sends_and_receives_show_below_python_only() -> None:
    """As a program that calls wait() on what isend() and irecv() gave it."""
    showing = figure_7()
    showing |= dict.fromkeys(range(24), "native_work")
    showing |= dict.fromkeys(range(24, 30), "native_recv")
    found = of(showing, layout=FIGURE_7)
    assert machines(found) == (12, 13, 14, 15)


def test_the_evaluation_that_hung_in_one_pipeline() -> None:
    """Stages wait in different places; two stages of one pipeline wait elsewhere than theirs."""
    showing: dict[int, str | Posture] = {}
    for rank in range(48):
        stage = rank // 2 % 6
        showing[rank] = {0: "eval_first", 5: "eval_last"}.get(stage, "eval_middle")
        if rank // 12 == 2 and stage in {2, 3}:
            showing[rank] = "eval_stuck"
    found = of(showing, layout=layout(2, "tp cp pp dp", tp=2, pp=6, dp=4))
    assert machines(found) == (12, 13, 14, 15, 16, 17)
    assert apart(found) == (14, 15)
    assert found.group == "pp 24-35"


def test_stages_that_wait_each_in_its_place_are_no_outliers() -> None:
    places = ("isend", "irecv", "all_gather", "reduce_scatter")
    found = of({rank: places[rank // 2 % 4] for rank in range(32)}, layout=FIGURE_7)
    assert found.result is LookResult.NOTHING


@pytest.mark.parametrize("state", ["T", "t", "D"])
def test_a_stopped_rank_goes_alone_though_its_pipeline_waits_elsewhere(state: str) -> None:
    showing = figure_7() | {26: posture("irecv", state)}
    found = of(showing, layout=FIGURE_7)
    assert machines(found) == (13,)
    assert (found.ranks, found.group) == ((26,), "")
    assert f"(state {state})" in found.why
    assert "while all 31 others wait, 24 of them in a collective" in found.why


# --- one rank holds the others up -----------------------------------------------------------------

HOLDERS = {
    "reads a pipe that never answers": (posture("reading", "S", "wait_for_partner"), True),
    "reads it, as newer kernels say": (posture("reading", "S", "anon_pipe_read"), True),
    "a write of a checkpoint that hangs": (posture("saving", "S"), True),
    "a stopped worker of its loader": (
        posture("loader", "S", "", worker("worker_idle", "T")),
        True,
    ),
    "a worker that sleeps in the kernel": (
        posture("loader", "S", "", worker("worker_idle"), worker("worker_busy", "D")),
        True,
    ),
    "a worker that reads a dead pipe": (
        posture("loader", "S", "", worker("worker_busy", "S", "pipe_read")),
        True,
    ),
    "a worker that computes": (posture("loader", "S", "", worker("worker_busy", "R")), True),
    "a loader whose workers are idle": (posture("loader", "S", "", worker("worker_idle")), False),
    "an idle worker waits in a pipe, too": (
        posture("loader", "S", "", worker("worker_idle", "S", "pipe_read")),
        False,
    ),
    "a lock in the program": (posture("lock"), False),
    "a lock that shows below Python": (posture("native_lock", "S", "futex_do_wait"), False),
    "what may wait for others": (posture("user_code", "S", "futex_do_wait"), True),
    "a sleep that only the kernel shows": (posture("user_code", "S", "hrtimer_nanosleep"), False),
    "it left": (posture("exit"), False),
    "an endless loop": (posture("user_code", "R", "futex_wait_queue"), True),
    "a stack that nobody else shows": (posture("backward", "R"), True),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_one_rank_that_holds_up_all_others(name: str) -> None:
    shown, machine = HOLDERS[name]
    found = of({**WAIT, 5: shown})
    assert found.ranks == (5,)
    assert found.result is (LookResult.MACHINES if machine else LookResult.CODE), found.why
    assert found.machines == ((2,) if machine else ())
    assert "all 7 others" in found.why or "7 of 8 ranks elsewhere" in found.why


def test_a_worker_of_a_rank_that_waits_counts_only_if_nobody_else_does() -> None:
    waits = posture("all_reduce", "S", "", worker("worker_idle", "T"))
    assert machines(of({**WAIT, 5: waits})) == (2,)
    assert of({**WAIT, 5: waits, 1: "lock"}).ranks == (1,)


def test_a_machine_that_does_not_answer() -> None:
    found = of(dict.fromkeys(range(6), "all_reduce"), silent=(NodeRank(3),), world_size=8)
    assert machines(found) == (3,)
    assert found.ranks == (6, 7)
    assert found.why == (
        "the machine of ranks 6-7 did not answer, while all 6 others wait in a collective"
        " (all_reduce), at average (train.py:61)"
    )


def test_too_many_at_once_are_no_machines_fault() -> None:
    asleep = {rank: posture("all_reduce", "D") for rank in range(0, 8, 2)}
    assert of({**WAIT, **asleep}).result is LookResult.NOTHING
    silent = of({0: "all_reduce", 1: "all_reduce"}, silent=(1, 2, 3), world_size=8)
    assert silent.result is LookResult.NOTHING
    assert of(dict.fromkeys(range(8), "reading")).result is LookResult.NOTHING


def test_what_takes_long_works() -> None:
    assert of(dict.fromkeys(range(8), "evaluating")).result is LookResult.WORKS
    most = {**dict.fromkeys(range(8), "evaluating"), 1: "barrier", 2: "barrier"}
    assert of(most).result is LookResult.WORKS
    one = of({**WAIT, 0: posture("evaluating", "R")})
    assert (one.result, one.ranks) == (LookResult.WORKS, (0,))


def test_a_disk_that_all_write_to_is_no_machines_fault() -> None:
    saving: Showing = dict.fromkeys(range(8), "saving")
    assert machines(of({**saving, 5: posture("saving", "D")})) == ()
    assert machines(of({**saving, 5: posture("saving", "T")})) == (2,)


def test_evaluation_of_one_rank_that_sleeps_is_the_programs() -> None:
    found = of({**WAIT, 0: posture("evaluating", "S", "hrtimer_nanosleep")})
    assert (found.result, found.ranks) == (LookResult.CODE, (0,))
    runs = worker("worker_busy", "R", role=Role.COMPILER)
    found = of({**WAIT, 0: posture("evaluating", "S", "hrtimer_nanosleep", runs)})
    assert found.result is LookResult.WORKS


def test_a_lock_on_many_ranks_is_the_programs() -> None:
    assert of({**WAIT, **dict.fromkeys((0, 2, 3, 5), "lock")}).result is LookResult.CODE


def test_ranks_that_spin_in_one_wait_are_no_outliers() -> None:
    spinning: Showing = dict.fromkeys(range(8), "spins")
    found = of({**spinning, 3: "spins_on"})
    assert found.result is LookResult.NOTHING
    assert "at log_loss (train.py:50)" in found.why


# --- nobody does ----------------------------------------------------------------------------------


def test_all_show_the_same() -> None:
    found = of(WAIT)
    assert found.result is LookResult.NOTHING
    assert found.why == "all 8 ranks are in a collective (all_reduce), at average (train.py:61)"


def test_no_stack_and_no_answer() -> None:
    found = of(dict.fromkeys(range(8), ""))
    assert (found.result, found.why) == (
        LookResult.NOTHING,
        "no stack could be taken: py-spy may not look into it",
    )
    assert of({}, world_size=8).result is LookResult.NOTHING
    few = of({**WAIT, 3: ""})
    assert few.result is LookResult.NOTHING


def test_a_deadlock_without_a_majority() -> None:
    places = ("all_reduce", "barrier", "all_gather")
    assert of({rank: places[rank % 3] for rank in range(8)}).result is LookResult.NOTHING


def test_ranks_that_wait_in_another_collective_went_another_way() -> None:
    found = of({**WAIT, 3: "other_all_reduce"})
    assert (found.result, found.ranks) == (LookResult.CODE, (3,))
    pipelines = layout(2, "tp cp pp dp", tp=2, pp=2, dp=4)
    showing = {**dict.fromkeys(range(16), "all_reduce"), 6: "other_all_reduce", 9: "barrier"}
    assert of(showing, layout=pipelines).result is LookResult.CODE


def test_a_whole_tensor_group_that_waits_elsewhere_is_its_machine() -> None:
    showing = {**dict.fromkeys(range(16), "all_reduce"), 6: "barrier", 7: "barrier"}
    found = of(showing, layout=layout(2, "tp cp pp dp", tp=2, pp=2, dp=4))
    assert machines(found) == (3,)


def test_the_same_split_on_every_machine_follows_the_layout() -> None:
    for place in ("barrier", "lock"):
        showing = {rank: place if rank % 4 == 0 else "all_reduce" for rank in range(16)}
        found = of(showing, ranks_per_machine=4)
        assert found.result is LookResult.NOTHING, found.why
        assert "follows the layout" in found.why


def test_without_a_layout_or_with_one_dimension_outliers_go_alone() -> None:
    showing = {**dict.fromkeys(range(16), "all_reduce"), 4: "irecv", 6: "isend"}
    for known in (None, layout(2, dp=16)):
        found = of(showing, layout=known)
        assert machines(found) == (2, 3)
        assert found.group == ""


def test_of_several_groups_that_cover_the_outliers_the_smallest_goes() -> None:
    """Machines 2 and 3 share a pipeline of 4 machines, and a data group of 8."""
    grid = layout(1, "tp cp pp dp", pp=4, dp=8)
    showing: Showing = {**dict.fromkeys(range(32), "all_reduce"), 9: "irecv", 10: "isend"}
    found = of(showing, layout=grid, ranks_per_machine=1)
    assert (found.group, machines(found)) == ("pp 8-11", (8, 9, 10, 11))
    showing = {**dict.fromkeys(range(32), "all_reduce"), 9: "irecv", 21: "isend"}
    found = of(showing, layout=grid, ranks_per_machine=1)
    assert found.group == "dp 1, 5, 9, 13, 17, 21, 25, 29"
    showing = {**dict.fromkeys(range(32), "all_reduce"), 9: "irecv", 22: "isend"}
    assert of(showing, layout=grid, ranks_per_machine=1).result is LookResult.NOTHING


def test_a_group_that_has_four_of_five_outliers_will_do() -> None:
    grid = layout(1, "tp cp pp dp", pp=4, dp=8)
    showing: Showing = {
        **dict.fromkeys(range(32), "all_reduce"),
        **dict.fromkeys((8, 9, 10, 11), "irecv"),
    }
    found = of({**showing, 30: "isend"}, layout=grid, ranks_per_machine=1)
    assert (found.group, apart(found, 1)) == ("pp 8-11", (8, 9, 10, 11, 30))


# --- flight records -------------------------------------------------------------------------------


def records(late: tuple[int, ...], *, ahead: bool = False, world: int = 8) -> dict[str, Any]:
    """All called collective 9 of one group, or only few did."""
    others = [rank for rank in range(world) if rank not in late]
    waiting, rest = (late, others) if ahead else (others, late)
    call = ((9, Call(op="all_reduce", numel_in=64)),)
    everybody = ranges_of(range(world))
    return {
        "stood": (
            stood(waiting, 9, 8, calls=call, members=everybody),
            stood(rest, 8, 8, members=everybody),
        )
    }


def test_a_rank_that_did_not_call_what_others_wait_in() -> None:
    computing: Showing = {**WAIT, 5: posture("compute", "R")}
    found = of(computing, **records((5,)))
    assert (machines(found), found.ranks) == ((2,), (5,))
    assert "7 ranks wait in collective 9 of group dp (all_reduce of 64 elements)" in found.why
    assert of({**WAIT, 5: "lock"}, **records((5,))).result is LookResult.CODE
    evaluates: Showing = {**WAIT, 5: posture("evaluating", "R")}
    assert of(evaluates, **records((5,))).result is LookResult.WORKS


def test_few_that_are_ahead_went_another_way() -> None:
    showing: Showing = {**dict.fromkeys(range(8), "backward"), 5: "all_reduce"}
    found = of(showing, **records((5,), ahead=True))
    assert (found.result, found.ranks) == (LookResult.CODE, (5,))
    showing = {**dict.fromkeys(range(8), "evaluating"), 5: "barrier"}
    assert of(showing, **records((5,), ahead=True)).result is LookResult.WORKS


def test_ranks_that_called_different_things_as_one_collective() -> None:
    calls = [((9, Call(op=op, numel_in=64)),) for op in ("all_reduce", "broadcast")]
    found = of(
        WAIT,
        stood=(
            stood((0, 1, 2, 4, 5, 6, 7), 9, 8, calls=calls[0]),
            stood((3,), 9, 8, calls=calls[1]),
        ),
    )
    assert (found.result, found.ranks) == (LookResult.CODE, (3,))
    assert "rank 3 broadcast of 64 elements, rank 0 all_reduce of 64 elements" in found.why


def circle(world: int = 4) -> dict[str, Any]:
    """Ranks 0 and 1 wait in one group for 2 and 3, which wait in another group for them."""
    everybody = ranges_of(range(4))
    return {
        "world_size": world,
        "stood": (
            stood((0, 1), 5, 4, "a", members=everybody),
            stood((2, 3), 4, 4, "a", members=everybody),
            stood((0, 1), 6, 6, "b", members=everybody),
            stood((2, 3), 7, 6, "b", members=everybody),
        ),
    }


def test_groups_used_in_different_orders() -> None:
    showing = {0: "all_reduce", 1: "all_reduce", 2: "barrier", 3: "barrier"}
    found = of(showing, ranks_per_machine=1, **circle())
    assert found.result is LookResult.CODE
    assert "wait for each other in different groups" in found.why


def test_one_without_a_record_may_be_whom_a_circle_waits_for() -> None:
    showing = {0: "all_reduce", 1: "all_reduce", 2: "barrier", 3: "barrier", 4: "all_reduce"}
    found = of(showing, ranks_per_machine=1, **circle(world=5))
    assert found.result is LookResult.NOTHING


def test_figure_7_with_flight_records_is_no_circle() -> None:
    """The ranks that are late in their data groups wait for a send that is not received."""
    groups = []
    for stage, tensor in ((s, t) for s in range(4) for t in range(2)):
        ranks = [tensor + 2 * (stage + 4 * data) for data in range(4)]
        members = ranges_of(ranks)
        call = ((9, Call(op="_reduce_scatter_base", numel_in=64)),)
        groups.append(stood(ranks[:3], 9, 8, f"dp{stage}{tensor}", members=members, calls=call))
        groups.append(stood(ranks[3:], 8, 8, f"dp{stage}{tensor}", members=members))
    last = ranges_of((30, 31))
    groups.append(stood((30, 31), 4, 3, "tp", members=last))
    pairs = [(24, 26), (25, 27), (26, 28), (27, 29), (28, 30), (29, 31)]
    peers = [Peer(rank=Rank(a), peer=Rank(b), sends=False) for a, b in pairs]
    found = of(figure_7(), layout=FIGURE_7, stood=tuple(groups), peers=tuple(peers))
    assert (machines(found), found.ranks) == ((15,), (30, 31))
    assert found.why.startswith("all others wait for ranks 30-31, which joined")
    peers += [Peer(rank=Rank(a), peer=Rank(b), sends=True) for a, b in ((30, 28), (31, 29))]
    found = of(figure_7(), layout=FIGURE_7, stood=tuple(groups[:-1]), peers=tuple(peers))
    assert found.ranks == (28, 29, 30, 31)
    assert "joined a send and a receive" in found.why
    assert (machines(found), found.group) == ((12, 13, 14, 15), "pp 24-31")


# --- the network ----------------------------------------------------------------------------------


def unreached(*pairs: tuple[int, int]) -> tuple[tuple[NodeRank, NodeRank], ...]:
    return tuple((NodeRank(a), NodeRank(b)) for a, b in pairs)


def test_a_machine_that_is_cut_off() -> None:
    """All have joined and nobody is late, but others do not reach machine 2."""
    joined = records(())
    found = of(WAIT, unreached=unreached((0, 2), (1, 2)), **joined)
    assert machines(found) == (2,)
    assert found.ranks == (4, 5)
    assert "cannot be reached by the others" in found.why
    assert machines(of(WAIT, unreached=unreached((2, 3), (2, 0)), **joined)) == (2,)
    assert of(WAIT, unreached=unreached((1, 2)), **joined).result is LookResult.NOTHING
    holder = of({**WAIT, 1: "lock"}, unreached=unreached((0, 2), (1, 2)))
    assert (holder.result, holder.ranks) == (LookResult.CODE, (1,))


def test_a_cut_in_the_middle_names_nobody() -> None:
    both = unreached((0, 1), (1, 0))
    assert (
        of({0: "all_reduce", 1: "all_reduce"}, ranks_per_machine=1, unreached=both).machines == ()
    )
    halves = unreached((0, 2), (1, 2), (1, 3), (2, 0), (3, 0), (3, 1))
    assert of(WAIT, unreached=halves).machines == ()


# --- two looks, and slow training -----------------------------------------------------------------


def test_two_looks_agree_if_nobody_is_named_anew() -> None:
    one, two = of({**WAIT, 5: "reading"}), of({**WAIT, 3: "reading"})
    assert agree(one, one)
    assert not agree(one, two)
    assert not agree(one, of(WAIT))


def test_slow_training_flags_the_group_with_the_largest_share() -> None:
    assert flagged(taken(figure_7(), layout=FIGURE_7, ranks_per_machine=2)) == ("pp 24-31",)
    one = {**dict.fromkeys(range(32), "reduce_scatter"), 13: "compute"}
    assert flagged(taken(one, layout=FIGURE_7, ranks_per_machine=2)) == ("tp 12-13",)
    two = {**one, 20: "compute"}
    assert flagged(taken(two, layout=FIGURE_7, ranks_per_machine=2)) == ("tp 12-13", "tp 20-21")
    assert machines_named(FIGURE_7, "tp 12-13") == {6}
    assert machines_named(FIGURE_7, "pp 24-31") == {12, 13, 14, 15}
    plain = layout(2, dp=32)
    assert flagged(taken(one, layout=plain, ranks_per_machine=2)) == ("machine with 12-13",)
    assert machines_named(plain, "machine with 12-13") == {6}
    same = taken(dict.fromkeys(range(32), "all_reduce"), layout=FIGURE_7, ranks_per_machine=2)
    assert flagged(same) == ()


# --- properties -----------------------------------------------------------------------------------

PLACE = st.sampled_from(sorted(PLACES))


@settings(max_examples=40, deadline=None)
@given(PLACE, st.sampled_from("RS"), st.sampled_from(list(Role)[1:]), st.sampled_from((1, 2, 8)))
def test_no_machine_is_named_when_all_show_the_same(
    place: str, state: str, role: Role, per: int
) -> None:
    showing = dict.fromkeys(range(16), posture(place, state, "", worker("worker_idle", role=role)))
    found = of(showing, layout=layout(per, tp=2, dp=8), ranks_per_machine=per)
    assert found.machines == ()


@settings(max_examples=40, deadline=None)
@given(st.lists(PLACE, min_size=8, max_size=8), st.permutations(range(8)))
def test_names_of_ranks_do_not_matter(places: list[str], order: list[int]) -> None:
    """Without a layout, whoever shows something is judged by what it shows alone."""
    plain = of(dict(enumerate(places)), ranks_per_machine=1)
    moved = of({order[rank]: place for rank, place in enumerate(places)}, ranks_per_machine=1)
    assert moved.result is plain.result
    assert sorted(order[rank] for rank in plain.ranks) == sorted(moved.ranks)
    assert sorted(order[at] for at in plain.machines) == sorted(moved.machines)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.integers(0, 31), PLACE, max_size=8))
def test_a_group_has_the_outliers_and_leaves_machines_to_compare_with(odd: dict[int, str]) -> None:
    showing = {**dict.fromkeys(range(32), "all_reduce"), **odd}
    found = of(showing, layout=FIGURE_7)
    assert set(found.ranks) <= set(range(32))
    assert len(found.machines) < 16
    if found.group:
        assert len(set(apart(found)) - set(machines(found))) <= len(apart(found)) // 5
    assert in_words(ranges_of(found.ranks)) in found.why or not found.ranks
