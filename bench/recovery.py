"""From a decision to the first new step: hot update, warm standby, a new machine, a full requeue.

Jobs of 2, 4 and 8 stand-in machines with one rank each. In every round and size a job with a
standby gets a hot update, then loses a machine, is then stopped as a whole and started anew from
its checkpoint on disk, now without a standby, and loses a machine again. Everything is a real
process: a machine is lost by killing its keeper and all below it, a new one is started cold.
Medians over the rounds; beside the table stand the figures of ByteRobust (arXiv 2509.16293, Tables
6 and 7 and section 8.2.1).

    python bench/recovery.py [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from fleet import Fleet, NotThere, Recovery, editions, hot_update, requeue, reschedule, standby_swap
from form import Row, arguments, report, table

SIZES = (2, 4, 8)
WAYS = ("hot_update", "standby_swap", "reschedule", "requeue")
EVICTED_ONE = 0.99
"""Weight of the loss of as many machines as standbys are kept for (here one), as in ByteRobust's
weighted average scheduling time. In the rest a switch takes more, and machines are waited for."""


class Plan(NamedTuple):
    """How often and how large."""

    sizes: tuple[int, ...]
    rounds: int


QUICK = Plan(sizes=(2, 4), rounds=1)
WHOLE = Plan(sizes=SIZES, rounds=5)


class Found:
    """All recoveries that were measured."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, int], list[Recovery]] = {}
        self.why_not: dict[str, str] = {}
        """Way -> why it could not be measured."""

    def add(self, way: str, machines: int, recovery: Recovery) -> None:
        self._all.setdefault((way, machines), []).append(recovery)
        spent = ", ".join(f"{name} {s:.3f}" for name, s in recovery.phases.items())
        say(f"  {way} at {machines}: {recovery.total_s:.3f} s ({spent})")

    def of(self, way: str, machines: int) -> list[Recovery]:
        """The quickest first."""
        return sorted(self._all.get((way, machines), []))

    def seconds(
        self, way: str, machines: int, figure: Callable[[Recovery], float] = lambda r: r.total_s
    ) -> float | None:
        """The median; None if it was not measured."""
        found = self.of(way, machines)
        return median(map(figure, found)) if found else None

    def ratios(self, above: str, below: Callable[[int], float | None]) -> list[float]:
        """Of each size that has both."""
        pairs = [(self.seconds(above, size), below(size)) for size in SIZES]
        return [a / b for a, b in pairs if a is not None and b is not None]


def main() -> None:
    args = arguments("Time from a decision to the first new step, four ways.")
    plan = QUICK if args.quick else WHOLE
    found = Found()
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        for number in range(plan.rounds):
            for size in plan.sizes:
                say(f"round {number + 1} of {plan.rounds}: {size} machines")
                measure(found, Path(name) / f"{number}-{size}", size)
    report(rows(found, plan), args.json)
    beside_the_paper(found)


def measure(found: Found, directory: Path, size: int) -> None:
    """All four ways once. The job that is started anew has no standby to start besides."""
    code, other = editions(directory, 0), editions(directory, 1)
    with Fleet(directory / "job", code, size, standbys=1) as job:
        job.settle()
        try:
            found.add("hot_update", size, hot_update(job, other, 1))
            job.settle()
        except NotThere as missing:
            found.why_not["hot_update"] = str(missing)
        found.add("standby_swap", size, standby_swap(job))
        job.settle()
        again = Fleet(directory / "again", code, size, standbys=0)
        with ExitStack() as ending:
            found.add("requeue", size, requeue(job, again, ending))
            again.settle()
            found.add("reschedule", size, reschedule(again))


# --- what is told --------------------------------------------------------------------------------


def rows(found: Found, plan: Plan) -> list[Row]:
    lines = [seconds_row(found, way, size, plan) for way in WAYS for size in SIZES]
    lines += [requests_row(found, size) for size in SIZES]
    lines += ratio_rows(found)
    lines += [growth_row(found, way) for way in WAYS]
    for way in WAYS:
        lines += [row for size in SIZES for row in phases_rows(found, way, size)]
    redone = [r.redone for way in WAYS for size in SIZES for r in found.of(way, size)]
    return [*lines, Row("steps_redone_max", max(redone), note="of all four ways")]


def seconds_row(found: Found, way: str, size: int, plan: Plan) -> Row:
    key, value = f"{way}_s_{size}", found.seconds(way, size)
    if value is None:
        left_out = "not measured" if size in plan.sizes else "left out by --quick"
        return Row(key, None, note=found.why_not.get(way, left_out))
    totals = [recovery.total_s for recovery in found.of(way, size)]
    return Row(key, value, note=f"{len(totals)} times, {min(totals):.3f} to {max(totals):.3f}")


def requests_row(found: Found, size: int) -> Row:
    value = found.seconds("hot_update", size, lambda r: r.from_cause_s)
    note = "from the command: upload, spread and trial included"
    return Row(f"hot_update_from_request_s_{size}", value, note=note if value else "not measured")


def ratio_rows(found: Found) -> list[Row]:
    hot = found.ratios("requeue", lambda n: found.seconds("hot_update", n))
    asked = found.ratios(
        "requeue", lambda n: found.seconds("hot_update", n, lambda r: r.from_cause_s)
    )
    swap = found.ratios("requeue", lambda n: weighted(found, n))
    cold = found.ratios("reschedule", lambda n: weighted(found, n))
    return [
        Row("hot_update_ratio", average(hot), at_least=11, note=each("requeue / hot update", hot)),
        Row(
            "hot_update_from_request_ratio",
            average(asked),
            note=each("requeue / hot update from the command", asked),
        ),
        Row(
            "standby_ratio",
            average(swap),
            at_least=10,
            note=each("requeue / standby swap, weighted", swap),
        ),
        Row(
            "standby_over_reschedule",
            average(cold),
            note=each("reschedule / standby swap, weighted", cold),
        ),
    ]


def weighted(found: Found, size: int) -> float | None:
    """Weighted average scheduling time with one standby."""
    swap, cold = found.seconds("standby_swap", size), found.seconds("reschedule", size)
    if swap is None or cold is None:
        return None
    return EVICTED_ONE * swap + (1 - EVICTED_ONE) * cold


def each(what: str, ratios: Sequence[float]) -> str:
    if not ratios:
        return f"{what}: not measured"
    return f"{what}, mean of {', '.join(f'{ratio:.1f}' for ratio in ratios)}"


def average(ratios: Sequence[float]) -> float | None:
    return mean(ratios) if ratios else None


def growth_row(found: Found, way: str) -> Row:
    """How flat it is in the number of machines."""
    sizes = [size for size in SIZES if found.of(way, size)]
    if len(sizes) < 2:
        return Row(f"{way}_growth", None, note="not measured")
    first, last = (found.seconds(way, size) for size in (sizes[0], sizes[-1]))
    assert first is not None, "measured"
    assert last is not None, "measured"
    note = f"from {sizes[0]} to {sizes[-1]} machines on the same cores"
    return Row(f"{way}_growth", last / first, note=note)


def phases_rows(found: Found, way: str, size: int) -> list[Row]:
    recoveries = found.of(way, size)
    if not recoveries:
        return []
    typical = recoveries[len(recoveries) // 2]
    before = ", ".join(f"{name} {took_s:.3f}" for name, took_s in typical.before.items())
    note = f"of the median, sum {typical.total_s:.3f} s; before the decision: {before}"
    return [Row(f"{way}_phases_{size}", typical.phases, note=note)]


def beside_the_paper(found: Found) -> None:
    """Both side by side. Only the ratios compare."""
    ours = {way: [found.seconds(way, size) for size in SIZES] for way in WAYS}
    head = ["seconds at so many machines", *map(str, SIZES), "| ByteRobust at 128", "256", "512"]
    lines = [
        [*head, "1024", ""],
        ["requeue", *shown(ours["requeue"]), *PAPER["requeue"], "Table 7"],
        ["hot update", *shown(ours["hot_update"]), *PAPER["hot_update"], "Table 7"],
        ["requeue / hot update", *over(ours, "hot_update"), *PAPER["ratio"], "mean 11.04"],
        ["code change, mean", "", "", "", "57", "", "", "", "Table 6, 64 at most"],
        ["standby swap", *shown(ours["standby_swap"]), "", "", "", "", "not published"],
        ["requeue / standby swap", *over(ours, "standby_swap"), *[""] * 4, "10.87 weighted"],
        ["reschedule", *shown(ours["reschedule"]), "", "", "", "", "not published"],
        [
            "reschedule / standby swap",
            *over(ours, "standby_swap", "reschedule"),
            *[""] * 4,
            "5.36 weighted",
        ],
    ]
    table(lines)


PAPER: Mapping[str, tuple[str, ...]] = {
    "requeue": ("454", "545", "635", "768"),
    "hot_update": ("46", "51", "54", "65"),
    "ratio": ("9.87", "10.69", "11.76", "11.82"),
}
"""Table 7, machines of 16 GPUs."""


def shown(values: Sequence[float | None]) -> list[str]:
    return ["none" if value is None else f"{value:.2f}" for value in values]


def over(
    ours: Mapping[str, Sequence[float | None]], below: str, above: str = "requeue"
) -> list[str]:
    pairs = zip(ours[above], ours[below], strict=True)
    return shown([None if a is None or b is None else a / b for a, b in pairs])


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
