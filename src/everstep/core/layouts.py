"""Which layout a job has: what people said of it, else what its ranks show.

The first source that gives one is taken, in this order: `--layout`, the mesh that the script gave
to everstep.attach(), the process groups of torch.distributed. The others are compared with it, and
a disagreement is told once. Pure functions of the state, for keeping.py, rules.py and the views.
"""

from __future__ import annotations

from functools import lru_cache

from everstep.core.groups import Layout, called, layout_of, size_of
from everstep.core.roles import NAMES, role
from everstep.core.seen import NoGrid, difference, infer
from everstep.core.state import State
from everstep.model import GroupShape, LayoutSpec, SeenGroups, Value

LAYOUT = "layout"
"""Key of the matter of which people are told."""
STATED = "--layout"
MESH = "the mesh given to attach()"
GROUPS = "the process groups of torch.distributed"


class Known(Value, frozen=True, kw_only=True):
    """What is known of the layout."""

    layout: Layout | None
    """None: nothing is."""
    source: str
    """Where it comes from; empty if nothing is known."""
    remarks: tuple[str, ...] = ()
    """One clause each: why another source gives none, names that say nothing."""
    disagreement: str = ""
    """One sentence for people if two sources cannot both be right."""


def known_layout(state: State) -> Known:
    job = state.job
    return known_from(job.layout, state.seen, job.world_size, job.nproc_per_node)


@lru_cache(maxsize=8)
def known_from(
    spec: LayoutSpec | None, seen: SeenGroups | None, world_size: int, ranks_per_machine: int
) -> Known:
    """The same from what it is made of, for intake.py, which has no state."""
    found: list[tuple[str, Layout]] = []
    remarks: list[str] = []
    if spec is not None:
        found.append((STATED, layout_of(spec, ranks_per_machine)))
    if seen is None:
        remarks.append("no groups were seen yet: ranks tell of them after their first step")
    else:
        for source, shapes in ((MESH, seen.mesh), (GROUPS, seen.groups)):
            try:
                if shapes:
                    found.append((source, infer(shapes, world_size, ranks_per_machine)))
            except NoGrid as error:
                remarks.append(f"{source}: {error}")
        remarks += _remarks(seen)
    if not found:
        return Known(layout=None, source="", remarks=tuple(remarks))
    return Known(
        layout=found[0][1],
        source=found[0][0],
        remarks=tuple(remarks),
        disagreement=_disagreement(found),
    )


def _remarks(seen: SeenGroups) -> list[str]:
    said = [f"{MESH}: {seen.mesh_problem}"] if seen.mesh_problem else []
    unknown = [shape for shape in seen.mesh if not role(shape.name)]
    if unknown:
        names = ", ".join(_called(shape) for shape in unknown)
        said.append(f"{MESH} has {names}, which says nothing here; known names are {NAMES}")
    if seen.odd:
        said.append(f"process groups that lie across the grid: {', '.join(seen.odd)}")
    return said


def _called(shape: GroupShape) -> str:
    return called(shape.name, size_of(shape.factors))


def _disagreement(found: list[tuple[str, Layout]]) -> str:
    """The first source against each other one."""
    (source, layout), *others = found
    clauses = [
        f"{other}, {seen.in_words()}: {clause}"
        for other, seen in others
        if (clause := difference(layout, seen))
    ]
    if not clauses:
        return ""
    return (
        f"the layout from {source} is {layout.in_words()} (the fastest dimension first), and that"
        f" does not go with {' and '.join(clauses)}; backups are placed by the former, so check it"
    )
