"""The layout as a running job shows it: from the shapes of its groups to the grid of its ranks.

shape_of() is for the rank, which turns the members of each of its groups into a few numbers (see
trainer/groups.py); infer() is for the controller's core, which makes one grid of all of them, and
difference() tells whether two layouts can be the same. Pure arithmetic; nothing is guessed: what
forms no grid is said to form none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from everstep.core.groups import Dimension, Factors, Layout, merged, size_of
from everstep.core.roles import is_no_dimension, role
from everstep.model import GroupShape, SeenGroups, UserError


class NoGrid(UserError):
    """The groups are none of a grid; the message says why."""


def shape_of(ranks: Sequence[int]) -> Factors | None:
    """The factors of a group with these members; None if it has no such shape."""
    found: list[tuple[int, int]] = []
    firsts = sorted(ranks)
    while len(firsts) > 1:
        stride = firsts[1] - firsts[0]
        steps = (b - a == stride for a, b in itertools.pairwise(firsts))
        size = 1 + sum(1 for _ in itertools.takewhile(bool, steps))
        if len(firsts) % size:
            return None
        run = [stride * at for at in range(size)]
        blocks = [firsts[at : at + size] for at in range(0, len(firsts), size)]
        if any([rank - block[0] for rank in block] != run for block in blocks):
            return None
        found.append((stride, size))
        firsts = [block[0] for block in blocks]
    first = firsts[0] if firsts else 0
    fit = all(low[0] * low[1] <= high[0] for low, high in itertools.pairwise(found))
    aligned = all((first // stride) % size == 0 for stride, size in found)
    return merged(found) if fit and aligned else None


def infer(shapes: Sequence[GroupShape], world_size: int, ranks_per_machine: int) -> Layout:
    """The grid that all these groups lie on. Raises NoGrid.

    A group of all ranks says nothing, unless its name does. Groups that are made of others (all of
    tp and pp, say) are on the grid, but are no kind of their own: nobody evicts them as one.
    """
    named = _by_factors(shapes, world_size)
    if not named:
        raise NoGrid("the only group is that of all ranks")
    cuts = sorted({1, world_size} | {cut for factors in named for cut in _cuts(factors)})
    if cuts[-1] > world_size:
        raise NoGrid(f"they reach beyond the {world_size} ranks that there are")
    for low, high in itertools.pairwise(cuts):
        if high % low:
            raise NoGrid(f"some begin at multiples of {low}, some at multiples of {high}")
    spans = [(low, high // low) for low, high in itertools.pairwise(cuts)]
    return Layout(
        dimensions=tuple(Dimension(name=named.get((span,), ""), size=span[1]) for span in spans),
        shapes=tuple(
            GroupShape(name=name, factors=factors)
            for factors, name in named.items()
            if role(name) or not _made_of(factors, named, spans)
        ),
        ranks_per_machine=ranks_per_machine,
    )


def _by_factors(shapes: Sequence[GroupShape], world_size: int) -> dict[Factors, str]:
    """Each shape once, with the best of its names, from the fastest to the slowest."""
    found: dict[Factors, str] = {}
    for shape in shapes:
        factors = merged(list(shape.factors))
        everybody = size_of(factors) == world_size and not role(shape.name)
        if not factors or everybody or is_no_dimension(shape.name):
            continue
        if not role(found.get(factors, "")):
            known = role(shape.name) or factors not in found
            name = shape.name.removeprefix("mesh_")  # as torch calls what it makes of a mesh
            found[factors] = name if known else found[factors]
    return dict(sorted(found.items()))


def _cuts(factors: Factors) -> list[int]:
    return [cut for stride, size in factors for cut in (stride, stride * size)]


def _made_of(factors: Factors, named: dict[Factors, str], spans: list[tuple[int, int]]) -> bool:
    """Whether it is all of some other groups together."""
    mine = _spans_in(factors, spans)
    inside = [_spans_in(other, spans) for other in named if other != factors]
    parts = [part for part in inside if part < mine]
    return bool(parts) and frozenset().union(*parts) == mine


def _spans_in(factors: Factors, spans: list[tuple[int, int]]) -> frozenset[tuple[int, int]]:
    return frozenset(
        span for span in spans if any(first <= span[0] < first * size for first, size in factors)
    )


def united(seen: Iterable[SeenGroups]) -> SeenGroups:
    """What several ranks or machines have seen, each thing once and in one order."""
    mesh: set[GroupShape] = set()
    groups: set[GroupShape] = set()
    odd: set[str] = set()
    problems: set[str] = set()
    for each in seen:
        mesh.update(each.mesh)
        groups.update(each.groups)
        odd.update(each.odd)
        problems.add(each.mesh_problem)
    return SeenGroups(
        mesh=tuple(sorted(mesh, key=_order)),
        mesh_problem=max(problems, default=""),
        groups=tuple(sorted(groups, key=_order)),
        odd=tuple(sorted(odd)),
    )


def _order(shape: GroupShape) -> tuple[Factors, str]:
    return shape.factors, shape.name


# --- two layouts ---------------------------------------------------------------------------------


def difference(stated: Layout, seen: Layout) -> str:
    """What of `seen` cannot be if `stated` is right, in one clause; empty if all can.

    `seen` may know less: dimensions that no group shows, groups without names. And data parallelism
    may be divided further there (into replicas of shards, into experts).
    """
    grid = _grid(stated)
    for shape in seen.shapes:
        wrong = _objection(shape, stated, grid)
        if wrong:
            return wrong
    return ""


_Grid = list[tuple[str, int, int]]
"""Name, stride and size of each dimension."""


def _grid(layout: Layout) -> _Grid:
    strides = itertools.accumulate(layout.sizes(), initial=1, func=int.__mul__)
    return [
        (d.name, stride, d.size)
        for d, stride in zip(layout.dimensions, strides, strict=False)
        if d.size > 1
    ]


def _objection(shape: GroupShape, stated: Layout, grid: _Grid) -> str:
    purpose, size = role(shape.name), size_of(shape.factors)
    what = f"{shape.name or 'an unnamed group'} of {size} ranks"
    if purpose == "ep":
        return _other_experts(shape, stated)
    whole: list[str] = []
    for name, stride, wanted in grid:
        part = _within(shape.factors, stride, wanted)
        if part == wanted:
            whole.append(role(name))
        elif part > 1 and role(name) not in ("dp", ""):
            return f"{what} has {part} of the {wanted} ranks of {name}"
        elif part > 1:
            whole.append("dp")
        elif part == 0:
            return f"{what} begins or ends inside {name}"
    if not purpose or not all(whole):
        return "" if len(set(whole)) <= 1 else f"{what} is {' and '.join(whole)} together"
    allowed = {"dp", "cp"} if purpose == "dp" else {purpose}
    if set(whole) <= allowed and purpose in whole:
        return ""
    return f"{what} lies along {' and '.join(whole)}"


def _other_experts(shape: GroupShape, stated: Layout) -> str:
    ours = [each for each in stated.shapes if role(each.name) == "ep"]
    if not ours or merged(list(ours[0].factors)) == merged(list(shape.factors)):
        return ""
    return f"{shape.name} has {size_of(shape.factors)} ranks, not {size_of(ours[0].factors)}"


def _within(factors: Factors, stride: int, size: int) -> int:
    """How many ranks of one group lie along this dimension; 0 if it cannot be said."""
    end = stride * size
    count = 1
    for first, many in factors:
        low, high = max(first, stride), min(first * many, end)
        if low >= high:
            continue
        if high % low:
            return 0
        count *= high // low
    return count
