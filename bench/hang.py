"""From the SIGSTOP of a rank to noticed, located and the first new step, beside torchrun, DLRover.

The same script trains on 4 gloo ranks under each of them, and its rank 0 evaluates alone now and
then while the others wait. everstep has two stand-in machines and a standby. The rivals know of a
hang only by the time-out of their collectives: it is set to the lowest that does not fire in the
same script when nothing is wrong, which is tried out first. A job has resumed when every rank has
finished a step of its next incarnation, by the clock that the ranks themselves write down. The
launchers take turns, A B A B, and medians are quoted.

    python bench/hang.py [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

from fleet import at
from form import Row, arguments, report
from launched import Dlrover, Everstep, Job, Program, Stuck, Torchrun
from rivals import DLROVER, RivalMissing, installed
from torch.distributed.constants import default_pg_timeout

from everstep.actions import JudgeStacks, OpenIncident, StartRanks
from everstep.events import StepBackedUp
from everstep.journal.records import Record
from everstep.looks import LookResult

Wanted = TypeVar("Wanted", JudgeStacks, OpenIncident)
RANKS = 4
VICTIM = 2
"""The rank that is stopped: neither the first nor the last, on the second of two machines."""
STOP_AFTER = 200
"""Steps: the second evaluation is past."""
EVALUATION_S = 3.0
TRIES_S = (1.0, 2.0, 5.0, 10.0, 20.0)
"""Time-outs that are tried, the lowest first."""
HEALTHY_STEPS = 1000
"""A time-out that has not fired by then is taken: six evaluations."""
KNOWN_S = 5.0
"""What --quick takes untried: found on an idle machine."""
PATIENCE_S = 300.0
"""On a busy machine."""
LOCATED_AFTER_S, RESUMED_AFTER_S = 10.0, 15.0
"""The aims, after the stall limit."""


class Plan(NamedTuple):
    """How often everything is done."""

    rounds: int
    rival_rounds: int
    """Of DLRover, which waits for the same time-out as torchrun."""
    quick: bool


QUICK = Plan(rounds=1, rival_rounds=0, quick=True)
WHOLE = Plan(rounds=3, rival_rounds=2, quick=False)


class Found(NamedTuple):
    """What one SIGSTOP led to under everstep; seconds from there."""

    limit_s: float
    noticed_s: float
    located_s: float
    resumed_s: float
    right: bool
    """Exactly the machine of the stopped rank was named, and that rank."""
    steps_lost: int
    alarms: int
    """Incidents before the stop: nothing was wrong then."""


def main() -> None:
    args = arguments("Seconds from the SIGSTOP of a rank to the first new step.")
    plan = QUICK if args.quick else WHOLE
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        rows = together(Path(name)) if plan.quick else taking_turns(plan, Path(name))
    report(rows, args.json)


def together(directory: Path) -> list[Row]:
    """Both at once: most of the time both only wait."""
    with ThreadPoolExecutor() as side:
        rival = side.submit(resumed, Torchrun(directory / "torchrun", program(KNOWN_S)))
        ours = one(Hung(directory / "everstep"))
        theirs = [rival.result()]
    return rows_of([ours], {"torchrun": theirs}, KNOWN_S, "left out by --quick")


def taking_turns(plan: Plan, directory: Path) -> list[Row]:
    limit_s = lowest_timeout(directory)
    rivals: dict[str, Callable[[Path], Job]] = {
        "torchrun": lambda path: Torchrun(path, program(limit_s))
    }
    reason = ""
    try:
        package = installed(DLROVER)
        rivals["dlrover"] = lambda path: Dlrover(path, program(limit_s), [package])
    except RivalMissing as missing:
        reason = str(missing)
    ours: list[Found] = []
    theirs: dict[str, list[float]] = {}
    for number in range(plan.rounds):
        say(f"round {number + 1} of {plan.rounds}")
        ours.append(one(Hung(directory / f"everstep-{number}")))
        for name, make in rivals.items():
            if name == "torchrun" or number < plan.rival_rounds:
                try:
                    found_s = resumed(make(directory / f"{name}-{number}"))
                    theirs.setdefault(name, []).append(found_s)
                except Stuck as stuck:
                    reason = f"it did not go on: {str(stuck).splitlines()[0]}"
                    say(f"  {name}: {stuck}")
    return rows_of(ours, theirs, limit_s, reason)


def program(timeout_s: float | None, *words: str) -> Program:
    """The script with this time-out of its collectives."""
    limit = () if timeout_s is None else ("--timeout", str(timeout_s))
    return Program("hang_script.py", (*limit, "--evaluate-s", str(EVALUATION_S), *words), RANKS)


# --- the rivals ----------------------------------------------------------------------------------


def lowest_timeout(directory: Path) -> float:
    """The lowest of those tried with which the script trains undisturbed under torchrun."""
    for number, timeout_s in enumerate(TRIES_S):
        with Torchrun(directory / f"try-{number}", program(timeout_s)) as job:
            job.wait(
                lambda: job.restarts() or job.steps(0) >= HEALTHY_STEPS,
                "end of the try",
                PATIENCE_S,
            )
            held = not job.restarts()
        say(f"time-out of {timeout_s:g} s: {'holds' if held else 'fires though nothing is wrong'}")
        if held:
            return timeout_s
    sys.exit(f"a time-out of {TRIES_S[-1]:g} s fires although nothing is wrong")


def resumed(job: Job) -> float:
    """Seconds from the stop of a rank to the first step of the next incarnation."""
    with job:
        stopped_s = stop_one(job)
        job.wait(lambda: job.restarted("step", 0), "step after the stop", PATIENCE_S)
        found_s = latest_s(job) - stopped_s
    say(f"  {job.name}: {found_s:.3f} s")
    return found_s


def stop_one(job: Job) -> float:
    """SIGSTOP the victim once training is under way; when, by the monotonic clock."""
    job.wait_steps(0, STOP_AFTER)
    pid = job.reached("step", 0)
    assert pid is not None, "waited for"
    at_s = time.monotonic()
    os.kill(pid[VICTIM].pid, signal.SIGSTOP)
    return at_s


def latest_s(job: Job) -> float:
    marks = job.restarted("step", 0)
    assert marks is not None, "waited for"
    return max(mark.at_ns for mark in marks) / 1e9


# --- everstep ------------------------------------------------------------------------------------


class Hung(Everstep):
    """Two stand-in machines with two ranks each, and a standby; every step is saved."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, program(None, "--save"), ("--standbys", "1"))

    def settle(self) -> None:
        """Wait until both machines have a copy of the other one's steps."""
        self.wait_steps(0, 1)
        self.wait(lambda: len(self._backed_up()) == self.machines, "backups of all ranks")

    def _backed_up(self) -> set[str]:
        return {r.event.machine for r in self.journal() if isinstance(r.event, StepBackedUp)}

    def machine_of(self, rank: int) -> str:
        """Who was started with this rank first."""
        node_rank = rank * self.machines // self.ranks
        starts = (a for r in self.journal() for a in r.actions if isinstance(a, StartRanks))
        return next(start.machine for start in starts if start.node_rank == node_rank)


def one(job: Hung) -> Found:
    """Stop a rank and see what comes of it."""
    with job:
        job.settle()
        stopped_s = stop_one(job)
        job.wait(lambda: job.restarted("step", 0), "step after the stop", PATIENCE_S)
        found = seen(job, stopped_s)
    say(f"  everstep: {found}")
    return found


def seen(job: Hung, stopped_s: float) -> Found:
    """By the controller's journal and the ranks' marks."""
    records = job.journal()
    after = [record for record in records if at(record) >= stopped_s]
    noticed, incident = next(of_kind(after, OpenIncident))
    located, verdict = next(
        (record, action)
        for record, action in of_kind(after, JudgeStacks)
        if action.result is LookResult.MACHINES
    )
    marks = job.restarted("step", 0)
    assert marks is not None, "waited for"
    done = min(job.last_step(rank, 0) for rank in range(RANKS))
    return Found(
        limit_s=stall_limit_s(incident.symptom),
        noticed_s=at(noticed) - stopped_s,
        located_s=at(located) - stopped_s,
        resumed_s=latest_s(job) - stopped_s,
        right=verdict.machines == (job.machine_of(VICTIM),) and VICTIM in verdict.ranks,
        steps_lost=done + 1 - min(mark.step for mark in marks),
        alarms=sum(1 for record, _ in of_kind(records, OpenIncident) if at(record) < stopped_s),
    )


def of_kind(records: Sequence[Record], kind: type[Wanted]) -> Iterator[tuple[Record, Wanted]]:
    """Decisions of this kind with their records, in order."""
    for record in records:
        for action in record.actions:
            if isinstance(action, kind):
                yield record, action


def stall_limit_s(symptom: str) -> float:
    """How long the controller waited for a step, by its own words."""
    said = re.search(r"for ([\d.]+) s", symptom)
    assert said is not None, symptom
    return float(said[1])


# --- what is told --------------------------------------------------------------------------------


def rows_of(
    ours: Sequence[Found], theirs: dict[str, list[float]], timeout_s: float, why_not: str
) -> list[Row]:
    limit_s, noticed_s = (median(each[field] for each in ours) for field in (0, 1))
    located_s, resumed_s = (median(each[field] for each in ours) for field in (2, 3))
    torchrun_s = median(theirs["torchrun"])
    return [
        Row("stall_limit_s", limit_s, note="without a step; by the controller"),
        Row("noticed_s", noticed_s, note=spread([each.noticed_s for each in ours])),
        Row(
            "located_s",
            located_s,
            at_most=limit_s + LOCATED_AFTER_S,
            note=spread([each.located_s for each in ours]),
        ),
        Row(
            "resumed_s",
            resumed_s,
            at_most=limit_s + RESUMED_AFTER_S,
            note=spread([each.resumed_s for each in ours]),
        ),
        Row("right_rank", all(each.right for each in ours), at_least=True, note="and its machine"),
        Row("steps_lost_max", max(each.steps_lost for each in ours), at_most=1),
        Row("false_alarms", sum(each.alarms for each in ours), at_most=0, note="before the stop"),
        Row("torchrun_timeout_s", timeout_s, note="the lowest tried that fires at nothing else"),
        Row("torchrun_resumed_s", torchrun_s, note=spread(theirs["torchrun"])),
        dlrover_row(theirs.get("dlrover", []), why_not),
        Row("ratio", torchrun_s / resumed_s, note="torchrun_resumed_s / resumed_s"),
        Row("framework_timeout_s", default_pg_timeout.total_seconds(), note="if nobody sets it"),
    ]


def dlrover_row(found: Sequence[float], why_not: str) -> Row:
    if not found:
        return Row("dlrover_resumed_s", None, note=why_not)
    return Row("dlrover_resumed_s", median(found), note=f"same time-out, {spread(found)}")


def spread(found: Sequence[float]) -> str:
    return f"median of {len(found)}, {min(found):.2f} to {max(found):.2f}"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
