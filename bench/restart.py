"""From the kill of a rank to the first new step: everstep beside torchrun and NVIDIA's launcher.

The same script trains on 4 ranks under each of them. After the same number of steps one rank gets
SIGKILL; the time runs until every rank has finished a step of the next incarnation, by the clock
that the ranks themselves write down. The launchers take turns, A B A B, and medians are quoted.
Then everstep alone: twenty restarts in a row; and what it costs when nothing happens: three jobs
live side by side and take turns of a second or two, all others stopped, so that what the machine
does besides hits all of them alike.

    python bench/restart.py [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from form import Row, arguments, report
from launched import Everstep, Job, Mark, Nvrx, Program, Stuck, Torchrun
from rivals import NVRX, RivalMissing, installed

from everstep.events import RankExited, RanksStopped

RANKS = 4
SAVING = Program("restart_script.py", ("--save",), RANKS)
PLAIN = Program("restart_script.py", (), RANKS)
KILL_AFTER = 100
"""Steps before the kill: past the first second, which is busy with what comes after a start."""
SETTLED = 30
"""Steps before a job's step time counts."""
WOKEN = 3
"""Steps at the start of a turn that do not count: the job was stopped in the middle of one."""
PROVEN = 12
"""Steps between two restarts in a row: an incident is closed after 10."""
SCRIPT_EVENTS = {
    "forked": "script",
    "imports": "imports",
    "rendezvous": "rendezvous",
    "restored": "restored",
    "first step": "step",
}
"""Phase of a restart -> the mark of the script that ends it."""
Make = Callable[[Path], Job]


class Plan(NamedTuple):
    """How often everything is done."""

    rounds: int
    rival_rounds: int
    """Of NVIDIA's launcher, which is much like torchrun."""
    restarts: int
    turns: int
    turn_s: float


QUICK = Plan(rounds=1, rival_rounds=0, restarts=5, turns=10, turn_s=0.4)
WHOLE = Plan(rounds=5, rival_rounds=2, restarts=20, turns=40, turn_s=1.0)


class Restart(NamedTuple):
    """One kill and what came of it."""

    total_s: float
    steps_lost: int
    phases: dict[str, float]
    """Seconds, in the order in which they were spent; empty where there is no journal."""


def main() -> None:
    args = arguments("Time from the kill of a rank to the first new step.")
    plan = QUICK if args.quick else WHOLE
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        directory = Path(name)
        rows = compared(plan, directory)
        rows += alone(plan, directory)
    report(rows, args.json)


# --- one restart, against the others -------------------------------------------------------------


def compared(plan: Plan, directory: Path) -> list[Row]:
    """The rows that compare launchers: medians over the rounds, the launchers taking turns."""
    makes: dict[str, Make] = {
        "everstep": lambda path: Everstep(path, SAVING),
        "torchrun": lambda path: Torchrun(path, SAVING),
    }
    reason = "left out by --quick"
    if plan.rival_rounds:
        try:
            package = installed(NVRX)
            makes["nvrx"] = lambda path: Nvrx(path, SAVING, [package])
        except RivalMissing as missing:
            reason = str(missing)
    found: dict[str, list[Restart]] = {name: [] for name in makes}
    for number in range(plan.rounds):
        for name, make in makes.items():
            if name == "nvrx" and number >= plan.rival_rounds:
                continue
            say(f"round {number + 1} of {plan.rounds}: {name}")
            restart = kill_once(make(directory / f"{name}-{number}"))
            say(f"  {restart.total_s:.3f} s, steps lost {restart.steps_lost}")
            found[name].append(restart)
    return comparison(found, reason)


def comparison(found: dict[str, list[Restart]], reason: str) -> list[Row]:
    ours = sorted(found["everstep"])
    typical = ours[len(ours) // 2]
    everstep_s = median(restart.total_s for restart in ours)
    torchrun_s = median(restart.total_s for restart in found["torchrun"])
    nvrx_s = median(r.total_s for r in found["nvrx"]) if "nvrx" in found else None
    lost = [restart.steps_lost for restart in ours]
    spread = f"kill to first new step, {shown(ours)}"
    return [
        Row("everstep_s", everstep_s, at_most=0.5, note=spread),
        Row("torchrun_s", torchrun_s, note=f"the same, {shown(found['torchrun'])}"),
        Row("nvrx_s", nvrx_s, note=f"the same, {shown(found['nvrx'])}" if nvrx_s else reason),
        Row("ratio", torchrun_s / everstep_s, at_least=20, note="torchrun_s / everstep_s"),
        Row("phases", typical.phases, note=f"of the median restart, sum {typical.total_s:.3f} s"),
        Row("steps_lost_max", max(lost), at_most=1, note="everstep; without a checkpoint: all"),
    ]


def shown(restarts: Sequence[Restart]) -> str:
    totals = [restart.total_s for restart in restarts]
    return f"median of {len(totals)}, {min(totals):.3f} to {max(totals):.3f}"


def kill_once(job: Job) -> Restart:
    with job:
        job.wait_steps(0, KILL_AFTER)
        return kill_and_wait(job, rank=RANKS - 1)


def kill_and_wait(job: Job, rank: int) -> Restart:
    """Kill this rank and wait until every rank has finished a step of a later incarnation."""
    before = job.restarts()
    killed_ns = job.kill_rank(rank)
    job.wait(lambda: job.restarted("step", before) is not None, "step after the kill")
    first = job.restarted("step", before)
    assert first is not None, "waited for"
    finished = min(job.last_step(rank, before) for rank in range(RANKS))
    return Restart(
        total_s=(latest(first) - killed_ns) / 1e9,
        steps_lost=finished + 1 - min(mark.step for mark in first),
        phases=phases(job, before, killed_ns) if isinstance(job, Everstep) else {},
    )


def phases(job: Everstep, before: int, killed_ns: int) -> dict[str, float]:
    """Where the time went: ends of phases from the journal and from the slowest rank's marks."""
    ends = {}
    # The controller counts from the wall clock at its start by the monotonic clock.
    ahead_s = time.time() - time.monotonic()
    noticed = stopped = 0.0
    for record in job.journal():
        if record.time - ahead_s < killed_ns / 1e9:
            continue
        if isinstance(record.event, RankExited) and not noticed:
            noticed = record.time - ahead_s
        if isinstance(record.event, RanksStopped):
            stopped = record.time - ahead_s
    ends["noticed"] = noticed
    ends["stopped and proven gone"] = stopped
    for phase, event in SCRIPT_EVENTS.items():
        marks = job.restarted(event, before)
        assert marks is not None, "the first step comes last"
        ends[phase] = latest(marks) / 1e9
    starts = [killed_ns / 1e9, *ends.values()]
    return {phase: end - start for (phase, end), start in zip(ends.items(), starts, strict=False)}


def latest(marks: list[Mark]) -> int:
    return max(mark.at_ns for mark in marks)


# --- everstep alone ------------------------------------------------------------------------------


def alone(plan: Plan, directory: Path) -> list[Row]:
    """What it costs when nothing happens; then one of these jobs is restarted in a row."""
    with Everstep(directory / "s", SAVING) as saving:
        saving.wait_steps(0, SETTLED)
        saving.pause()
        rows = undisturbed(plan, directory, saving)
        saving.resume()
        return rows + in_a_row(plan, saving)


def in_a_row(plan: Plan, job: Job) -> list[Row]:
    """Restart the same job again and again; counts until the first one that fails."""
    restarts: list[Restart] = []
    try:
        for number in range(plan.restarts):
            job.wait_steps(job.restarts(), PROVEN)
            restarts.append(kill_and_wait(job, rank=number % RANKS))
    except Stuck as stuck:
        say(f"restart {len(restarts) + 1} failed: {stuck}")
    longest = max((restart.total_s for restart in restarts), default=None)
    note = shown(restarts) if restarts else "none succeeded"
    return [
        Row("restarts_in_a_row_ok", len(restarts), at_least=plan.restarts, note=note),
        Row("restarts_in_a_row_max_s", longest),
    ]


def undisturbed(plan: Plan, directory: Path, saving: Job) -> list[Row]:
    """Step time of three jobs that take turns: torchrun, everstep, everstep with saves."""
    jobs = [Torchrun(directory / "t", PLAIN), Everstep(directory / "e", PLAIN)]
    with ExitStack() as stack:
        for job in jobs:
            stack.enter_context(job)
            job.wait_steps(0, SETTLED)
            job.pause()
        turns = [[turn(job, plan.turn_s) for job in (*jobs, saving)] for _ in range(plan.turns)]
        for job in jobs:
            job.resume()
    torchrun, everstep, saved = ([row[index] for row in turns] for index in range(3))
    overhead = median(e / t for e, t in zip(everstep, torchrun, strict=True)) - 1
    adds = median(s / e for s, e in zip(saved, everstep, strict=True)) - 1
    of = f"median of {plan.turns} pairs"
    return [
        Row("step_s_torchrun", median(torchrun), note="checkpoints off"),
        Row("step_s_everstep", median(everstep), note="checkpoints off"),
        Row("step_s_everstep_saving", median(saved), note="a checkpoint every step"),
        Row("step_time_overhead", overhead, at_most=0.02, note=f"over torchrun, {of}"),
        Row("every_step_save_adds", adds, note=f"over everstep without, {of}"),
    ]


def turn(job: Job, turn_s: float) -> float:
    """Let one job run for a while; the usual time of a step, the first few left out."""
    begun_ns = time.monotonic_ns()
    job.resume()
    time.sleep(turn_s)
    job.wait(lambda: len(job.ends_since(begun_ns)) > 2 * WOKEN, "steps in its turn")
    job.pause()
    ends = job.ends_since(begun_ns)[WOKEN:]
    return median(later - earlier for earlier, later in pairwise(ends)) / 1e9


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
