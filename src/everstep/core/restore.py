"""Which step a new generation restores: the newest of which every rank has a complete copy.

Pure arithmetic over what agents reported; called by core/rules.py. A copy is named by its step and
by the generation that computed it: shards belong together only if both agree, because a step that
was computed twice need not have the same bits. A published step serves every rank, anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from everstep.model import NO_GENERATION, NO_STEP, Copy, Published, Rank, Value


class Choice(Value, frozen=True, kw_only=True):
    """The step to restore and where its shards lie."""

    copy: Published
    """(NO_STEP, NO_GENERATION) for a start from scratch."""
    from_memory: int
    from_disk: int
    why: str


def choose(ranks: Iterable[Rank], copies: Sequence[Copy], published: Sequence[Published]) -> Choice:
    """Newest step that all `ranks` can restore, from memory where they can, else from disk.

    `copies` are those in the memory of the machine that will run their rank.
    """
    wanted = list(ranks)
    holders: dict[Published, set[Rank]] = {
        entry: set() for entry in published
    }  # only looked up, never iterated: its order decides nothing
    for copy in copies:
        key = Published(step=copy.step, generation=copy.generation)
        holders.setdefault(key, set()).add(copy.rank)
    on_disk = set(published)
    complete = [key for key, held in holders.items() if key in on_disk or held >= set(wanted)]
    if not complete:
        return Choice(
            copy=Published(step=NO_STEP, generation=NO_GENERATION),
            from_memory=0,
            from_disk=0,
            why="no step has a complete copy on every rank: training starts at step 0",
        )
    best = max(complete, key=lambda key: (key.step, key.generation))
    in_memory = sum(rank in holders[best] for rank in wanted)
    return Choice(
        copy=best,
        from_memory=in_memory,
        from_disk=len(wanted) - in_memory,
        why=_why(best, in_memory, len(wanted)),
    )


def _why(best: Published, in_memory: int, ranks: int) -> str:
    where = f"{in_memory} of {ranks} ranks have it in memory"
    if in_memory < ranks:
        where += f", {ranks - in_memory} read it from disk"
    return f"step {best.step} is the newest step with a complete copy on every rank ({where})"
