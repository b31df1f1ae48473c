"""Joins two changes of the same code, file by file. Pure; the controller's server calls it.

An update is a change of what its author had, and by the time it comes others may be pending. What
only one side changed is taken from that side; what both changed alike, from either. Nothing is
merged within a file: that is for the author to do, who is told which files those are.
"""

from __future__ import annotations

from typing import NamedTuple

from everstep.code.manifest import Entry, Manifest, by_path, parents, shown


class Conflicts(NamedTuple):
    """Both sides changed these files, and not alike."""

    paths: tuple[str, ...]


def merge(base: Manifest, ours: Manifest, theirs: Manifest) -> Manifest | Conflicts:
    """`ours` with what `theirs` changed of `base`, or the files that both changed."""
    count = max(len(base.roots), len(ours.roots), len(theirs.roots))
    roots: list[tuple[Entry, ...]] = []
    conflicts: list[str] = []
    for number in range(count):
        sides = [by_path(side, number) for side in (base, ours, theirs)]
        entries, paths = _merge_root(*sides)
        conflicts += [shown(number, path) for path in paths]
        roots.append(entries)
    return Conflicts(tuple(conflicts)) if conflicts else Manifest(roots=tuple(roots))


def _merge_root(
    base: dict[str, Entry], ours: dict[str, Entry], theirs: dict[str, Entry]
) -> tuple[tuple[Entry, ...], list[str]]:
    merged: dict[str, Entry] = {}
    conflicts = set()
    for path in base.keys() | ours.keys() | theirs.keys():
        before, mine, other = base.get(path), ours.get(path), theirs.get(path)
        if other not in (before, mine) and mine != before:
            conflicts.add(path)
            continue
        kept = mine if other == before else other
        if kept is not None:
            merged[path] = kept
    # One side made a file where the other has a directory.
    conflicts |= {path for path in merged if not merged.keys().isdisjoint(parents(path))}
    return tuple(merged[path] for path in sorted(merged)), sorted(conflicts)
