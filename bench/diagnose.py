"""How fast a log is diagnosed, beside grep, and how soon a line of a rank is evidence.

A log of a gigabyte, as a job of 64 ranks writes it into one file: progress of every step, warnings,
and at the end an error with its echoes. `everstep diagnose` reads it, and so does `grep -cE` with
the same alternatives, turn by turn; medians are quoted.

    python bench/diagnose.py [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from form import Row, arguments, report
from launched import Everstep, Program, fresh

from everstep.diagnosis.logs import Patterns
from everstep.diagnosis.tables import own_rules
from everstep.events import EvidenceFound

RANKS = 64
GIGABYTE = 1_000_000_000
QUICK_BYTES = 200_000_000
WITHIN_S = 120.0
"""Far above the ten seconds that the job takes."""
ECHO = (
    "[rank{rank}]:[W1019 21:08:46.866165802 TCPStore.cpp:125] [c10d] recvValue failed on "
    "SocketImpl(fd=99, addr=[node-{node:02}]:48732, remote=[node-00]:29517): failed to recv\n"
)
CAUSE = (
    "[rank37]:[E1019 21:08:44.561203887 ProcessGroupNCCL.cpp:1896] [PG ID 0 PG GUID 0(default_pg) "
    "Rank 37] Process group watchdog thread terminated with exception: CUDA error: uncorrectable "
    "ECC error encountered\n"
)


class Run(NamedTuple):
    """One reading of the log."""

    seconds: float
    peak_rss_bytes: int


def main() -> None:
    """Make the log, read it in turns, report."""
    options = arguments(__doc__.partition("\n")[0])
    size, rounds = (QUICK_BYTES, 3) if options.quick else (GIGABYTE, 5)
    with tempfile.TemporaryDirectory() as folder:
        log, alternatives = Path(folder) / "job.log", Path(folder) / "alternatives"
        print(f"making a log of {size / 1e6:.0f} MB", flush=True)
        make_log(log, size)
        alternatives.write_text("\n".join(grep_alternatives()))
        ours: list[Run] = []
        greps: list[Run] = []
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", flush=True)
            ours.append(timed([sys.executable, "-m", "everstep", "diagnose", "--json", str(log)]))
            greps.append(timed(["grep", "-cE", "-f", str(alternatives), str(log)]))
        bytes_ = log.stat().st_size
        print("a job whose rank prints failures", flush=True)
        delays = live_latencies(Path(folder) / "job")
    everstep = bytes_ / median(run.seconds for run in ours)
    grep = bytes_ / median(run.seconds for run in greps)
    report(
        [
            Row("everstep_bytes_per_s", everstep, note="whole command, start-up included"),
            Row("grep_bytes_per_s", grep, note=f"{len(grep_alternatives())} alternatives"),
            Row("ratio", everstep / grep, at_least=0.5),
            Row(
                "live_latency_s",
                median(delays),
                at_most=0.2,
                note=f"median of {len(delays)} lines, worst {max(delays):.2f}",
            ),
            Row("peak_rss_bytes", max(run.peak_rss_bytes for run in ours), at_most=3e8),
        ],
        options.json,
    )


def make_log(path: Path, size: int) -> None:
    """Progress of 64 ranks, interleaved, with what is usual between; a failure at the end."""
    chance = random.Random(7)
    lines = []
    for step in range(2000):
        rank = chance.randrange(RANKS)
        lines.append(
            f"[default{rank % 8}]:[rank{rank}]: [2025-11-03 04:{step % 60:02}:03] iteration "
            f"{step:8}/  240000 | consumed samples: {step * 2048:12} | elapsed time per iteration "
            f"(ms): {8600 + chance.random() * 50:.1f} | learning rate: 2.412000E-04 | global batch "
            f"size:  2048 | lm loss: {2.2 + chance.random() / 50:.6E} | loss scale: 1.0 | "
            f"grad norm: {0.3 + chance.random() / 20:.3f} |\n"
        )
        if step % 10 == 0:
            lines.append(
                f"node-{rank // 8:02}:7704{rank}:77040 [{rank % 8}] NCCL INFO Channel 00\n"
            )
        if step % 50 == 0:
            lines.append(
                "/opt/venv/lib/python3.11/site-packages/torch/x.py:12: FutureWarning: old\n"
            )
    block = "".join(lines).encode()
    with path.open("wb") as out:
        while out.tell() + len(block) < size:
            out.write(block)
        out.write(CAUSE.encode())
        for rank in range(RANKS):
            out.write(ECHO.format(rank=rank, node=rank // 8).encode())


def live_latencies(directory: Path) -> list[float]:
    """Seconds from the moment that a rank prints a line to its evidence in the journal."""
    program = Program("diagnose_script.py", (), ranks=2)
    with Everstep(fresh(directory), program) as job:
        deadline = time.monotonic() + WITHIN_S
        while not (job.job_directory / "result.json").exists():
            if time.monotonic() > deadline:
                raise SystemExit("the job that prints failures did not end")
            time.sleep(0.1)
        told: dict[tuple[int | None, str], float] = {}
        for record in job.journal():
            if isinstance(record.event, EvidenceFound):
                for finding in record.event.findings:
                    if finding.place is not None:
                        told.setdefault((finding.speaker.rank, finding.place.text), record.time)
    delays = []
    for rank in range(program.ranks):
        for entry in (directory / "marks" / f"said-{rank}").read_text().splitlines():
            at, _, line = entry.partition(" ")
            delays.append(told[rank, line] - float(at))
    return delays


def grep_alternatives() -> list[str]:
    """The patterns of all rules as grep's extended expressions, where it has the means."""
    found = []
    for entry in Patterns(own_rules()).entries:
        text = re.sub(r"\(\?P<\w+>|\(\?:|\(\?i:", "(", entry.regex).replace("(?i)", "")
        text = text.replace(r"\d", "[0-9]").replace("{0,}", "*")
        found.append(text)
    return found


def timed(command: list[str]) -> Run:
    """Run a command to its end; its output is thrown away."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"LC_ALL": "C"})
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    code = os.waitstatus_to_exitcode(status)
    if code not in {0, 1}:
        raise SystemExit(f"{' '.join(command[:4])} ended with {code}")
    process.returncode = code
    return Run(seconds, usage.ru_maxrss * 1024)


if __name__ == "__main__":
    main()
