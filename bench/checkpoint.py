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
from orders import LEFTOVERS
from rivals import DLROVER, LM_RESILIENCY, RivalMissing, installed

BEGUN_S = time.monotonic()
LARGE = Sizes(layers=14, width=512)
"""512 MiB on each rank: parameters and two moments of AdamW, 581 tensors."""
SMALL = Sizes(layers=2, width=64)
"""1.7 MiB on each rank."""
PACKAGES = {"dlrover": DLROVER, "lm_resiliency": LM_RESILIENCY}
SHARD_BYTES = 512 << 20
"""What plain sockets move, each, beside backups of the large state."""
ALONE = "lm_resiliency"
NEEDED_BYTES = 16 << 30
"""Both jobs: the state and its gradients twice, 7 GiB of everstep's, 5 GiB of the rivals'."""
SHORT_S = 0.3
"""Forward and backward while transfers are measured."""
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
    alone: tuple[Length, ...]
    """Of the large state, with lm-resiliency: it keeps four copies, so it gets a job of its own."""
    small: tuple[Length, ...]
    kills: int
    rivals: tuple[str, ...]
    counts: Counts


QUICK = Plan(
    (Length(1.5, "", 1),),
    (),
    (),
    kills=1,
    rivals=("dcp_staged", "dcp_async"),
    counts=Counts(none=2, saved=5, rival=2, before_kill=3),
)
WHOLE = Plan(
    (Length(1.5, "", 3), Length(0.3, "_0_3s", 3), Length(5.0, "_5s", 1)),
    (Length(1.5, "", 2),),
    (Length(0.3, "_small", 3),),
    kills=5,
    # DLRover forks, which goes wrong beside the threads of others: it begins. And what keeps memory
    # comes before what gives it back, or one would hide in the other.
    rivals=("dlrover", "dcp", "dcp_staged", "dcp_async"),
    # Between two kills 12: an incident is closed after 10, and three of them end a job.
    counts=Counts(none=3, saved=7, rival=3, before_kill=12),
)


def main() -> None:
    args = arguments("What a checkpoint of every step costs.")
    plan = QUICK if args.quick else WHOLE
    findings = Findings()
    packages = rival_packages(plan, findings)
    with tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=SHM) as memory:
        large(plan, Path(memory), packages, findings)
    if plan.small:
        with tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=SHM) as memory:
            small(plan, Path(memory), packages, findings)
    report([*rows_of(findings), Row("took_s", time.monotonic() - BEGUN_S)], args.json)
    table(summary_of(findings))


def large(plan: Plan, memory: Path, packages: Sequence[Path], findings: Findings) -> None:
    need(NEEDED_BYTES)
    with everstep_job(memory, LARGE) as (files, job):
        with rival_job(memory, LARGE, packages) as (rival_files, rival):
            started(job, rival)
            ours = EverstepSide(job, files, plan.counts)
            theirs = RivalSide(rival, rival_files, plan.counts)
            work = calibrated(ours)
            measure(plan.large, work, ours, theirs, plan.rivals, findings)
            if "dcp" in plan.rivals:
                findings.dcp_load_s += [theirs.dcp_load_s() for _ in range(plan.kills)]
            findings.memory |= theirs.memory
        if plan.alone:
            with rival_job(memory, LARGE, packages) as (rival_files, rival):
                started(rival)
                theirs = RivalSide(rival, rival_files, plan.counts)
                measure(plan.alone, work, ours, theirs, [ALONE], findings)
                findings.memory |= theirs.memory
        findings.backups_failed += ours.backups_failed()
        for number in range(plan.kills):
            findings.kills.append(ours.kill(rank=number % RANKS))
            say(f"kill {number + 1} of {plan.kills}: {findings.kills[-1]}")
        sizes = ours.shared_memory_bytes()
        findings.memory["everstep"] = sizes["slots"]
        findings.memory["everstep_kept_for_peers"] = sizes["kept for peers"]


def small(plan: Plan, memory: Path, packages: Sequence[Path], findings: Findings) -> None:
    with (
        everstep_job(memory, SMALL) as (files, job),
        rival_job(memory, SMALL, packages) as (rival_files, rival),
    ):
        started(job, rival)
        ours = EverstepSide(job, files, plan.counts)
        theirs = RivalSide(rival, rival_files, plan.counts)
        measure(plan.small, calibrated(ours), ours, theirs, [*plan.rivals, ALONE], findings)


def need(wanted: int) -> None:
    """Better to refuse than to be killed in the middle."""
    available = available_bytes()
    if available < wanted:
        gib = 1 << 30
        raise SystemExit(
            f"bench/checkpoint.py needs {wanted / gib:.0f} GiB of memory,"
            f" and {available / gib:.1f} GiB are available: end something else first"
        )


def rival_packages(plan: Plan, findings: Findings) -> list[Path]:
    """Where the rivals of the plan are; notes the reasons of those that are not."""
    tried = (*plan.rivals, ALONE) if plan.alone else plan.rivals
    findings.missing |= {name: "left out by --quick" for name in TITLES if name not in tried}
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


class Work(NamedTuple):
    """What forward and backward take here as they are, and what a unit of extra work adds."""

    plain_s: float
    unit_s: float

    def units(self, compute_s: float) -> int:
        return max(0, round((compute_s - self.plain_s) / self.unit_s))


def calibrated(ours: EverstepSide) -> Work:
    """And all memory of everstep's is faulted in."""
    work = Work(*ours.unit_s())
    say(f"forward and backward take {work.plain_s:.3f} s, first saves fault memory in")
    ours.warm_up(WARM_UNITS)
    return work


def measure(
    lengths: Sequence[Length],
    work: Work,
    ours: EverstepSide,
    theirs: RivalSide,
    savers: Sequence[str],
    findings: Findings,
) -> None:
    theirs.missing |= findings.missing
    for length in lengths:
        units = work.units(length.compute_s)
        for number in range(length.rounds):
            say(f"steps of {length.compute_s} s: round {number + 1} of {length.rounds}")
            seen = ours.round(units), theirs.round(units, savers)
            findings.add(length.suffix, *seen)
            say(told(*seen))
            if not length.suffix:
                moved = ours.transfers(work.units(SHORT_S), SHARD_BYTES)
                say(f"  {moved}")
                findings.transfers.append(moved)
    findings.missing |= theirs.missing


def told(ours: EverstepRound, theirs: dict[str, Seen]) -> str:
    """One round in a line, for who waits."""
    figures = {"everstep": ours.seen, **theirs}
    return "  blocked s: " + ", ".join(f"{n} {seen.blocked_s:.4f}" for n, seen in figures.items())


@contextmanager
def everstep_job(memory: Path, sizes: Sizes) -> Iterator[tuple[Path, Everstep]]:
    """The job, and the directory of its files."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        files = Path(name)
        with Everstep(files / "job", program(files, memory, sizes), FLAGS) as job:
            yield files, job


@contextmanager
def rival_job(
    memory: Path, sizes: Sizes, packages: Sequence[Path]
) -> Iterator[tuple[Path, Torchrun]]:
    """The same of torchrun."""
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="everstep-bench-"))
        files = Path(name)
        stack.callback(remove_leftovers, memory)
        job = Torchrun(files / "job", program(files, memory, sizes), packages)
        yield files, stack.enter_context(job)


def remove_leftovers(memory: Path) -> None:
    """What DLRover leaves in shared memory, and its sockets, once its processes are gone."""
    note = memory / LEFTOVERS
    if note.exists():
        name = note.read_text()
        for segment in SHM.glob(f"{name}_*"):
            segment.unlink()
        shutil.rmtree(Path("/tmp/ckpt_sock") / name, ignore_errors=True)


def say(line: str) -> None:
    print(f"{time.monotonic() - BEGUN_S:4.0f} s  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
