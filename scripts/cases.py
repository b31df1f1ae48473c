"""`make cases`: how well diagnosis answers the casebook, as a table.

Prints the confusion of categories and the shares of the two expensive mistakes: evicting the
innocent, and rolling back code that was not at fault. Exits with 1 if any case lost a mark.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from everstep.diagnosis.answer import Answer
from tests.diagnosis.casebook import CASES, Case, Mark, answer_to, cases, mark


def main() -> int:
    """Answer all cases and print what came of it."""
    parser = argparse.ArgumentParser(description="Answer the casebook and print the marks.")
    parser.add_argument("folder", nargs="?", type=Path, default=CASES)
    results = [
        (case, answer, mark(case, answer))
        for case in cases(parser.parse_args().folder)
        for answer in [answer_to(case)]
    ]
    console = Console(highlight=False)
    _print_lost(console, results)
    _print_confusion(console, results)
    _print_shares(console, [found for _, _, found in results])
    return 0 if all(found.full for _, _, found in results) else 1


def _print_lost(console: Console, results: list[tuple[Case, Answer, Mark]]) -> None:
    table = Table("case", "expected", "answered", "accused", box=None, title="marks lost")
    for case, answer, found in results:
        if found.full:
            continue
        accused = ", ".join([*answer.accused_machines, *map(str, answer.accused_ranks)])
        table.add_row(
            case.name,
            f"{case.expect['category']}, {case.expect['first_action']}",
            f"{answer.category}, {answer.first_action}",
            accused if not found.innocent else "",
        )
    if table.row_count:
        console.print(table)


def _print_confusion(console: Console, results: list[tuple[Case, Answer, Mark]]) -> None:
    pairs = Counter(
        (case.expect["category"], answer.category if not found.category else "right")
        for case, answer, found in results
    )
    table = Table("category", "cases", "right", "answered instead", box=None)
    for category in sorted({expected for expected, _ in pairs}):
        of = {
            answered: count for (expected, answered), count in pairs.items() if expected == category
        }
        others = ", ".join(f"{count} {name}" for name, count in of.items() if name != "right")
        table.add_row(category, str(sum(of.values())), str(of.get("right", 0)), others)
    console.print(table)


def _print_shares(console: Console, marks: list[Mark]) -> None:
    count = len(marks)

    def share(name: str, hits: int) -> None:
        console.print(f"{name:<34}{hits:>4} of {count}  {hits / max(1, count):7.1%}")

    share("full marks", sum(found.full for found in marks))
    share("root class right", sum(found.root for found in marks))
    share("false evictions", sum(found.false_eviction for found in marks))
    share("false rollbacks", sum(found.false_rollback for found in marks))
    share("false alarms", sum(found.false_alarm for found in marks))
    share("missed", sum(found.missed for found in marks))
    named, known = sum(m.culprits_named for m in marks), sum(m.culprits for m in marks)
    console.print(f"{'culprits named':<34}{named:>4} of {known}")


if __name__ == "__main__":
    sys.exit(main())
