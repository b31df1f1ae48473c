"""Judges a look at all stacks, from the frames of all machines to the group; for aggregate.py.

A process of its own, so that its memory is what a controller needs for it and no more.

    python aggregate_judge.py FRAMES_FILE       prints one line of JSON
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from everstep import wire
from everstep.core.aggregate import Taken, conclude
from everstep.core.groups import Layout, layout_of
from everstep.core.intake import Intake
from everstep.looks import Fingerprint, Stack
from everstep.model import LayoutSpec
from everstep.sightings import MachineStacks, StacksSent, StacksTaken

PER_MACHINE = 8
LENGTH = struct.Struct("<I")


class Grid(NamedTuple):
    """The layout of the job: tensor groups fill machines, stages are machines in a row."""

    replicas: int
    stages: int = 10

    @property
    def machines(self) -> int:
        return self.stages * self.replicas

    @property
    def ranks(self) -> int:
        return self.machines * PER_MACHINE

    def layout(self) -> Layout:
        spec = LayoutSpec(
            tp=PER_MACHINE, pp=self.stages, dp=self.replicas, order=("tp", "cp", "pp", "dp")
        )
        return layout_of(spec, PER_MACHINE)


def frames_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while head := file.read(LENGTH.size):
            yield file.read(LENGTH.unpack(head)[0])


def main() -> None:
    """Read, fold, judge, and say how long each took."""
    path, grid = Path(sys.argv[1]), Grid(int(sys.argv[2]))
    began = time.process_time()
    intake = Intake(grid.machines)
    fact: StacksTaken | None = None
    stacks: dict[Fingerprint, Stack] = {}
    for data in frames_of(path):
        frame = wire.decode(data)
        assert isinstance(frame, wire.Bare)
        report = wire.decode_report(frame.body or b"")
        if isinstance(report, StacksSent):
            stacks |= {stack.fingerprint: stack for stack in report.stacks}
        elif isinstance(report, MachineStacks):
            told = intake.take(report, 0.0)
            assert told is None or isinstance(told, StacksTaken)
            fact = told or fact
    assert fact is not None
    folded = time.process_time()
    found = conclude(
        Taken(
            clusters=fact.clusters,
            stacks=stacks,
            stood=fact.stood,
            layout=grid.layout(),
            world_size=grid.ranks,
            ranks_per_machine=PER_MACHINE,
        )
    )
    judged = time.process_time()
    said = {
        "fold_s": folded - began,
        "judge_s": judged - folded,
        "clusters": len(fact.clusters),
        "stacks": len(stacks),
        "machines": [int(machine) for machine in found.machines],
        "group": found.group,
        "result": str(found.result),
        "why": found.why,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
