"""Which step is restored."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from everstep.core.restore import choose
from everstep.model import NO_STEP, Copy, Generation, Published, Rank, Step


def copy(rank: int, step: int, generation: int = 1) -> Copy:
    return Copy(rank=Rank(rank), step=Step(step), generation=Generation(generation))


def published(step: int, generation: int = 1) -> Published:
    return Published(step=Step(step), generation=Generation(generation))


RANKS = [Rank(0), Rank(1)]


def test_the_newest_step_that_every_rank_holds() -> None:
    copies = [copy(0, 7), copy(0, 8), copy(0, 9), copy(1, 6), copy(1, 7), copy(1, 8)]
    choice = choose(RANKS, copies, [])
    assert (choice.copy, choice.from_memory, choice.from_disk) == (published(8), 2, 0)


def test_without_any_common_copy_training_starts_anew() -> None:
    choice = choose(RANKS, [copy(0, 7), copy(1, 6)], [])
    assert choice.copy.step == NO_STEP


def test_equal_steps_of_two_generations_do_not_belong_together() -> None:
    copies = [copy(0, 8, 1), copy(1, 8, 2), copy(0, 5, 1), copy(1, 5, 1)]
    assert choose(RANKS, copies, []).copy == published(5, 1)


def test_a_published_step_serves_ranks_without_memory() -> None:
    choice = choose(RANKS, [copy(0, 8), copy(0, 5)], [published(5)])
    assert (choice.copy, choice.from_memory, choice.from_disk) == (published(5), 1, 1)
    assert "1 of 2 ranks have it in memory, 1 read it from disk" in choice.why


def test_memory_that_is_newer_than_the_disk_wins() -> None:
    copies = [copy(0, 9), copy(1, 9)]
    assert choose(RANKS, copies, [published(5)]).copy == published(9)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 2)), max_size=20),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 2)), max_size=2),
)
def test_the_choice_is_complete_and_nothing_newer_is(
    held: list[tuple[int, int, int]], on_disk: list[tuple[int, int]]
) -> None:
    ranks = [Rank(0), Rank(1), Rank(2)]
    copies = [copy(*entry) for entry in held]
    disk = [published(*entry) for entry in on_disk]

    def complete(step: int, generation: int) -> bool:
        key = published(step, generation)
        return key in disk or all(copy(rank, step, generation) in copies for rank in ranks)

    choice = choose(ranks, copies, disk).copy
    candidates = [pair for pair in itertools.product(range(6), (1, 2)) if complete(*pair)]
    best = max(candidates, default=(-1, 0))
    assert (choice.step, choice.generation) == best
