"""What torchfrtrace prints about flight records: one block per collective that went wrong.

Its "culprit" is whoever differs from the first rank it looked at, and its "missing ranks" may be
nearly all; so only the facts are taken, and standing.py judges them as it does the records.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from everstep.diagnosis.findings import Finding, Place, Site
from everstep.diagnosis.hangs import finding_of, history
from everstep.diagnosis.standing import Call, Shape, Standing, Standstill, standstill
from everstep.model import Rank, Value

_HEAD = re.compile(
    r"(?:Not all ranks joining collective[,:] sequence number:|Collective sequence number:"
    r"|Ranks have mismatched collective[^:]*:) ?(\d+)(?: has errors)?"
)
_FIELD = re.compile(
    r"(group info|collective|missing ranks|expected ranks|collective state|error msg|input sizes)"
    r": (.*)"
)
_CULPRIT = re.compile(r"Culprit rank (\d+); Error type: (\w+)(?:, ([^;]*?))?(?=, Culprit rank|$)")
_DIFFERENT = frozenset({"COLLECTIVE_TYPE_MISMATCH", "SIZE_OR_SYNTAX_MISMATCH"}) | {
    "COLLECTIVE_DTYPE_MISMATCH"
}


class Block(Value, frozen=True, kw_only=True):
    """One collective of the report."""

    place: Place
    seq: int
    group: str = "0"
    op: str = "?"
    missing: tuple[Rank, ...] = ()
    expected: tuple[Rank, ...] = ()
    errors: tuple[tuple[Rank, str, str], ...] = ()
    """Rank, kind of error, what the report says of it."""


def read(text: str, file: str) -> list[Block] | None:
    """The blocks of a report; None if there is none."""
    blocks: list[tuple[Place, int, dict[str, str]]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if head := _HEAD.search(line):
            place = Place(file=file, line=number, text=line.strip()[:200])
            blocks.append((place, int(head.group(1)), {}))
        elif blocks and (field := _FIELD.search(line)):
            blocks[-1][2].setdefault(field.group(1), field.group(2).strip())
    return [_block(*block) for block in blocks] or None


def _block(place: Place, seq: int, fields: dict[str, str]) -> Block:
    return Block(
        place=place,
        seq=seq,
        group=fields.get("group info", "0").split(":")[0],
        op=fields.get("collective", "?").split(":")[-1],
        missing=_ranks(fields.get("missing ranks", "")),
        expected=_ranks(fields.get("expected ranks", "")),
        errors=tuple(
            (Rank(int(rank)), kind, said or "")
            for rank, kind, said in _CULPRIT.findall(fields.get("error msg", ""))
        ),
    )


def _ranks(text: str) -> tuple[Rank, ...]:
    return tuple(sorted(Rank(int(number)) for number in re.findall(r"\d+", text)))


def analyse(attempts: Sequence[Sequence[Block]], site: Site) -> list[Finding]:
    """What the reports of all attempts tell; the newest is the root."""
    findings = [
        finding_of("report", _standstill(blocks), site, blocks[0].place, at)
        for at, blocks in enumerate(attempts)
        if blocks
    ]
    return history(findings)


def _standstill(blocks: Sequence[Block]) -> Standstill:
    for block in blocks:
        different = [error for error in block.errors if error[1] in _DIFFERENT]
        if different:
            rank, kind, said = different[0]
            reference = next((r for r in block.expected if r != rank), rank)
            return Standstill(
                shape=Shape.DIFFERENT,
                group=block.group,
                seq=block.seq,
                ranks=tuple(sorted({error[0] for error in different})),
                size=len(block.expected),
                other=(rank, Call(op=said or kind)),
                reference=(reference, Call(op=block.op)),
            )
    return standstill([s for block in blocks for s in _standings(block)])


def _standings(block: Block) -> list[Standing]:
    return [
        Standing(
            rank=rank,
            group=block.group,
            members=block.expected,
            enqueued=block.seq - (rank in block.missing),
            completed=block.seq - 1,
            calls={} if rank in block.missing else {block.seq: Call(op=block.op)},
        )
        for rank in block.expected
    ]


class Reports:
    """Collects the reports of a job and judges them at the end."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[Block]] = {}

    def take(self, file: str, data: bytes, attempt: int = 0) -> bool:
        """Keep what a text tells; False if it is no report."""
        blocks = read(data.decode("utf-8", errors="replace"), file)
        self._blocks.setdefault(attempt, []).extend(blocks or [])
        return blocks is not None

    def findings(self, site: Site) -> list[Finding]:
        """What all of them tell together."""
        return analyse([self._blocks[at] for at in sorted(self._blocks)], site)
