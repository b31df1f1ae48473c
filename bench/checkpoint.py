"""What saving every step costs: everstep beside torch's DCP, DLRover and lm-resiliency.

Two jobs live side by side and take turns: one under `everstep run` on two stand-in machines, one
under torchrun for the rivals. All ranks do the same steps with the same state, 1 GiB in all, and
every turn with saves has one without beside it in the same job. Then a rank of everstep's is
killed, again and again, and restores from memory.

    python bench/checkpoint.py [--quick] [--json FILE]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from checkpoint_rows import TITLES, Findings, rows_of, summary_of
from checkpoint_turns import (
    FLAGS,
    RANKS,
    SHM,
    Counts,
    EverstepRound,
    EverstepSide,
    RivalSide,
    Seen,
    Sizes,
    program,
    started,
)
from form import Row, arguments, report, table
from launched import Everstep, Torchrun
from rivals import DLROVER, LM_RESILIENCY, RivalMissing, installed

LARGE = Sizes(layers=14, width=512)
"""512 MiB on each rank: parameters and two moments of AdamW, 581 tensors."""
SMALL = Sizes(layers=2, width=64)
"""1.7 MiB on each rank."""
PACKAGES = {"dlrover": DLROVER, "lm_resiliency": LM_RESILIENCY}
SHARD_BYTES = 512 << 20
"""What plain sockets move, each, beside backups of the large state."""
NEEDED_BYTES = 19 << 30
"""By both jobs with all rivals: the state twice, 7 GiB of slots, 6 GiB of the rivals', files."""
WARM_UNITS = 10
"""Of extra work, where nothing is measured."""


class Length(NamedTuple):
    """A kind of step."""

    compute_s: float
    """Forward and backward."""
    suffix: str
    """Of its keys."""
    rounds: int


class Plan(NamedTuple):
    """How often everything is done."""

    large: tuple[Length, ...]
    small: tuple[Length, ...]
    kills: int
    rivals: tuple[str, ...]
    counts: Counts


QUICK = Plan(
    (Length(1.5, "", 1),),
    (),
    kills=1,
    rivals=("dcp_staged", "dcp_async"),
    counts=Counts(none=2, saved=6, rival=2, before_kill=4),
)
WHOLE = Plan(
    (Length(1.5, "", 4), Length(0.3, "_0_3s", 3), Length(5.0, "_5s", 1)),
    (Length(0.3, "_small", 3),),
    kills=5,
    # What keeps memory comes before what gives it back, or one hides in the other.
    rivals=("dcp", "dcp_staged", *PACKAGES, "dcp_async"),
    # Between two kills 12: an incident is closed after 10, and three of them end a job.
    counts=Counts(none=3, saved=7, rival=3, before_kill=12),
)


def main() -> None:
    args = arguments("What a checkpoint of every step costs.")
    begun = time.monotonic()
    plan = QUICK if args.quick else WHOLE
    findings = Findings()
    packages = rival_packages(plan, findings)
    with sides(LARGE, plan.counts, packages) as (ours, theirs):
        measure(plan.large, ours, theirs, plan.rivals, findings)
        findings.backups_failed += ours.backups_failed()
        kill(plan.kills, ours, findings)
        note_memory(ours, theirs, findings)
        if "dcp" in plan.rivals:
            findings.dcp_load_s += [theirs.dcp_load_s() for _ in range(plan.kills)]
    if plan.small:
        with sides(SMALL, plan.counts, packages) as (ours, theirs):
            measure(plan.small, ours, theirs, plan.rivals, findings)
    report([*rows_of(findings), Row("took_s", time.monotonic() - begun)], args.json)
    table(summary_of(findings))


def rival_packages(plan: Plan, findings: Findings) -> list[Path]:
    """Where the rivals of the plan are; notes the reasons of those that are not."""
    findings.missing |= {name: "left out by --quick" for name in TITLES if name not in plan.rivals}
    available = available_bytes()
    if "lm_resiliency" in plan.rivals and available < NEEDED_BYTES:
        findings.missing["lm_resiliency"] = (
            f"it keeps four copies, {NEEDED_BYTES >> 30} GiB in all with everything else,"
            f" and {available / (1 << 30):.1f} GiB are available"
        )
    packages = []
    for name, rival in PACKAGES.items():
        if name not in findings.missing:
            try:
                packages.append(installed(rival))
            except RivalMissing as missing:
                findings.missing[name] = str(missing)
    return packages


def available_bytes() -> int:
    """Memory that processes can get now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise AssertionError("every Linux since 3.14 says it")


def measure(
    lengths: Sequence[Length],
    ours: EverstepSide,
    theirs: RivalSide,
    savers: Sequence[str],
    findings: Findings,
) -> None:
    plain_s, unit_s = ours.unit_s()
    say(f"forward and backward {plain_s:.3f} s, a unit of extra work {unit_s * 1e3:.2f} ms")
    say("first saves: memory is faulted in")
    ours.warm_up(WARM_UNITS)
    theirs.missing |= findings.missing
    for length in lengths:
        units = max(0, round((length.compute_s - plain_s) / unit_s))
        for number in range(length.rounds):
            say(f"steps of {length.compute_s} s: round {number + 1} of {length.rounds}")
            seen = ours.round(units), theirs.round(units, savers)
            findings.add(length.suffix, *seen)
            say(told(*seen))
            if not length.suffix:
                findings.sockets.append(ours.socket_bytes_per_s(units, SHARD_BYTES))
    findings.missing |= theirs.missing


def told(ours: EverstepRound, theirs: dict[str, Seen]) -> str:
    """One round in a line, for who waits."""
    figures = {"everstep": ours.seen, **theirs}
    return "  blocked s: " + ", ".join(f"{n} {seen.blocked_s:.4f}" for n, seen in figures.items())


def kill(kills: int, ours: EverstepSide, findings: Findings) -> None:
    for number in range(kills):
        findings.kills.append(ours.kill(rank=number % RANKS))
        say(f"kill {number + 1} of {kills}: {findings.kills[-1]}")


def note_memory(ours: EverstepSide, theirs: RivalSide, findings: Findings) -> None:
    sizes = ours.shared_memory_bytes()
    findings.memory["everstep"] = sizes["slots"]
    findings.memory["everstep_kept_for_peers"] = sizes["kept for peers"]
    findings.memory |= theirs.memory


@contextmanager
def sides(
    sizes: Sizes, counts: Counts, packages: Sequence[Path]
) -> Iterator[tuple[EverstepSide, RivalSide]]:
    """Both jobs, started at the same time."""
    with ExitStack() as stack:
        names = [
            stack.enter_context(tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=at))
            for at in (None, None, SHM)
        ]
        ours_at, theirs_at, memory = map(Path, names)
        stack.callback(remove_leftovers, memory)
        ours = Everstep(ours_at / "job", program(ours_at, memory, sizes), FLAGS)
        theirs = Torchrun(theirs_at / "job", program(theirs_at, memory, sizes), packages)
        for job in (ours, theirs):
            stack.enter_context(job)
        for job in (ours, theirs):
            started(job)
        yield EverstepSide(ours, ours_at, counts), RivalSide(theirs, theirs_at, counts)


def remove_leftovers(memory: Path) -> None:
    """What DLRover leaves in shared memory, and its sockets, once its processes are gone."""
    note = memory / "dlrover-leaves"
    if note.exists():
        name = note.read_text()
        for segment in SHM.glob(f"{name}_*"):
            segment.unlink()
        shutil.rmtree(Path("/tmp/ckpt_sock") / name, ignore_errors=True)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
