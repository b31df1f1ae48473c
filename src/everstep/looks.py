"""What one look at all processes of a job shows: stacks, states of the kernel, collectives.

Nouns of actions.py, sightings.py and the core. Agents take the stacks (agent/tracing/) and say of
each rank what it shows, in fingerprints; the text of a stack travels once, however many ranks show
it. core/aggregate.py says what it all means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NewType

from everstep.diagnosis.frames import Thread
from everstep.diagnosis.standing import Call
from everstep.model import Rank, Value

Fingerprint = NewType("Fingerprint", str)
"""Of what two processes that do the same have in common: 16 hex digits."""
NO_STACK = Fingerprint("")
Ranges = tuple[tuple[int, int], ...]
"""Ranks as (first, last) pairs, in order; a hundred thousand that are alike are one pair."""


class Purpose(StrEnum):
    """Why stacks are looked at."""

    HANG = "hang"
    SLOW = "slow"
    ASKED = "asked"
    """A person wants to see them."""


class LookResult(StrEnum):
    """What a look showed."""

    MACHINES = "machines"
    """Machines are named."""
    CODE = "code"
    """The program did it, whatever machines it runs on."""
    NOTHING = "nothing"
    """Nobody can be named."""
    AGAIN = "again"
    """Another look is needed."""
    WORKS = "works"
    """They do something that takes long, and it goes on."""
    WENT_ON = "went on"
    """Steps were finished meanwhile: it was no hang."""
    SHOWN = "shown"
    """It was for people."""


class Role(StrEnum):
    """What a process is to its rank."""

    RANK = "rank"
    LOADER = "loader"
    """A worker of its data loader."""
    SAVER = "saver"
    """It writes checkpoints."""
    COMPILER = "compiler"
    CHILD = "child"
    """Another one that it started."""


class Shown(Value, frozen=True, kw_only=True):
    """What one process shows."""

    stack: Fingerprint = NO_STACK
    state: str = ""
    """The kernel's letter: R runs, S sleeps, D sleeps and cannot be killed, T is stopped."""
    wchan: str = ""
    """The function of the kernel that it waits in; empty: none, or not to be seen."""
    why_none: str = ""
    """Why it has no stack, as a clause; empty if it has."""


class Child(Value, frozen=True, kw_only=True):
    """Children of one rank that show the same."""

    role: Role
    shown: Shown
    count: int = 1


class Posture(Value, frozen=True, kw_only=True):
    """What one rank shows, with its children: ranks with equal ones do the same."""

    rank: Shown
    children: tuple[Child, ...] = ()
    """In a fixed order, those that are alike as one."""


class RankLook(Value, frozen=True, kw_only=True):
    """One rank in one look."""

    rank: Rank
    posture: Posture
    pid: int = 0


class Cluster(Value, frozen=True, kw_only=True):
    """Ranks that show the same."""

    posture: Posture
    ranks: Ranges


class Stack(Value, frozen=True, kw_only=True):
    """The text of a fingerprint, as one of the processes that show it has it."""

    fingerprint: Fingerprint
    threads: tuple[Thread, ...]
    native: bool = False
    """Frames below Python are in it."""


class Stood(Value, frozen=True, kw_only=True):
    """How far some ranks are in one of their groups, by torch's flight recorder."""

    group: str
    """Its name, as torch has it."""
    members: Ranges = ()
    """Empty: nobody says."""
    enqueued: int | None = None
    """Number of the last collective that they called."""
    completed: int | None = None
    """Of the last one that they finished."""
    calls: tuple[tuple[int, Call], ...] = ()
    """The first few that are not finished, by number."""
    ranks: Ranges = ()


def ranges_of(ranks: Iterable[int]) -> Ranges:
    """The same ranks as pairs."""
    found: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if found and found[-1][1] == rank - 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return tuple(found)


def joined(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Pairs from several sources as pairs in order, each rank in one of them."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(pairs):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)


def ranks_in(ranges: Ranges) -> Iterator[Rank]:
    """The ranks that pairs stand for, in order."""
    for first, last in ranges:
        yield from map(Rank, range(first, last + 1))


def size_of(ranges: Ranges) -> int:
    """How many they are."""
    return sum(last - first + 1 for first, last in ranges)


def in_words(ranges: Ranges, most: int = 8) -> str:
    """For people: "0-11, 14", and how many more."""
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:most]]
    more = size_of(ranges[most:])
    return ", ".join(shown) + (f" and {more} more" if more else "")
