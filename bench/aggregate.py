"""How long a controller takes to name the group at fault in the stacks of 100,000 ranks.

Four processes are stuck as in Figure 7 of the ByteRobust paper, and py-spy dumps them. Copies with
other thread ids, lines, addresses, helpers and order make 12,500 machines of 8 ranks, of which one
pipeline of 10 machines is stuck. What their agents send is decoded, folded and judged on one core.

    python bench/aggregate.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from aggregate_judge import LENGTH, PER_MACHINE, Grid
from aggregate_script import RANKS
from form import Row, arguments, report

from everstep import wire
from everstep.diagnosis.fingerprints import fingerprint_of
from everstep.diagnosis.frames import Dump
from everstep.diagnosis.stacks import read
from everstep.diagnosis.standing import Call
from everstep.looks import Child, Fingerprint, Posture, RankLook, Role, Shown, Stack, Stood
from everstep.model import Generation, MachineId, Rank
from everstep.sightings import MachineStacks, StacksSent

GRID = Grid(replicas=1250)
STUCK = 777
"""The replica whose pipeline is stuck."""
COPIES = 64
"""Different dumps of each of the four ranks and of their workers."""
WITHIN_S = 120.0
WAITS_IN = ("futex_do_wait", "futex_wait_queue", "0", "")
"""What kernels say of one that waits for a lock of its own."""


def main() -> None:
    """Dump, perturb, judge, report."""
    options = arguments(__doc__.partition("\n")[0])
    rounds = 3 if options.quick else 5
    with tempfile.TemporaryDirectory() as folder:
        print("four ranks that get stuck", flush=True)
        ranks, workers = real_dumps(Path(folder))
        chance = random.Random(7)
        shown = [perturbed(text, "", chance) for text in ranks]
        loaders = [perturbed(text, Role.LOADER, chance) for text in workers]
        per_machine = machine_seconds(ranks, workers)
        path = Path(folder) / "frames"
        print(f"frames of {GRID.machines} machines", flush=True)
        size = write_frames(path, shown, loaders, chance)
        judged = [judge(path) for _ in range(rounds)]
    print(judged[-1]["why"])
    report(rows(judged, shown, per_machine, size), options.json)


def rows(
    judged: list[dict[str, Any]], shown: list[list[Stack]], per_machine: float, size: int
) -> list[Row]:
    """The figures of all rounds."""
    seconds = [run["fold_s"] + run["judge_s"] for run in judged]
    expected = [STUCK * GRID.stages + stage for stage in range(GRID.stages)]
    right = all(run["machines"] == expected for run in judged)
    alike = all(len({stack.fingerprint for stack in copies}) == 1 for copies in shown)
    return [
        Row("ranks", GRID.ranks),
        Row("seconds", median(seconds), at_most=5.0, note=f"of one core; worst {max(seconds):.2f}"),
        Row("fold_s", median(run["fold_s"] for run in judged), note="decoded and clustered"),
        Row("judge_s", median(run["judge_s"] for run in judged), note="group found"),
        Row("peak_rss_bytes", max(run["peak_rss_bytes"] for run in judged), at_most=1e9),
        Row("right_group", right, at_least=1, note=judged[-1]["group"]),
        Row("copies_alike", alike, at_least=1, note=f"{COPIES} copies of each dump"),
        Row("clusters", judged[-1]["clusters"]),
        Row("distinct_stacks", judged[-1]["stacks"], note="whose text travels"),
        Row("wire_bytes", size, note="of all machines"),
        Row("machine_s", per_machine, note="to read and name the dumps of one machine"),
    ]


# --- real dumps -----------------------------------------------------------------------------------


def real_dumps(folder: Path) -> tuple[list[str], list[str]]:
    """What py-spy prints of each rank and of its worker, as JSON."""
    with stuck_ranks(folder) as processes:
        ranks = [spied(process.pid) for process in processes]
        workers = [spied(child_of(process.pid)) for process in processes]
    return ranks, workers


@contextmanager
def stuck_ranks(folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Four ranks, once each of them is where it stays."""
    script = Path(__file__).with_name("aggregate_script.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        deadline = time.monotonic() + WITHIN_S
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "stuck\n":
                raise SystemExit("a rank ended before it got stuck")
        while any(is_running(process.pid) for process in processes):
            if time.monotonic() > deadline:
                raise SystemExit(f"the ranks are not stuck after {WITHIN_S:g} s")
            time.sleep(0.2)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def is_running(pid: int) -> bool:
    """Whether a rank is on its way to where it gets stuck: no call of its step shows."""
    names = {frame["name"] for thread in json.loads(spied(pid)) for frame in thread["frames"]}
    return not names & {"sync_gradients", "recv_forward", "send_forward", "gather_logits"}


def spied(pid: int) -> str:
    """As agents ask py-spy."""
    spy = Path(sys.executable).with_name("py-spy")
    command = [str(spy), "dump", "--json", "--nonblocking", "--pid", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


def child_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return int(text.split()[0])


# --- many of them ---------------------------------------------------------------------------------


def perturbed(text: str, role: str, chance: random.Random) -> list[Stack]:
    """Copies of a dump, of which all differs that may."""
    found = []
    for _ in range(COPIES):
        (dump,) = read(other(text, chance), "dump.json") or []
        found.append(stack_of(dump, role))
    return found


def stack_of(dump: Dump, role: str) -> Stack:
    return Stack(fingerprint=Fingerprint(fingerprint_of(dump.threads, role)), threads=dump.threads)


def other(text: str, chance: random.Random) -> str:
    """Another process that does the same, as py-spy would print it."""
    threads = json.loads(text)
    pid = chance.randrange(1 << 22)
    for thread in threads:
        main = thread["os_thread_id"] == thread["pid"]
        thread["pid"] = pid
        thread["os_thread_id"] = pid if main else pid + chance.randrange(1, 999)
        thread["thread_id"] = chance.randrange(1 << 47)
        thread["active"] = chance.random() < 0.5
        for frame in thread["frames"]:
            frame["line"] += chance.randrange(3)
        below = {"name": f"0x{chance.randrange(1 << 47):x}", "short_filename": "libc.so.6"}
        thread["frames"].append({**thread["frames"][-1], **below})
    helpers = [thread for thread in threads if thread["os_thread_id"] != pid]
    threads += [helper | {"os_thread_id": pid + 1000} for helper in helpers[: chance.randrange(3)]]
    chance.shuffle(threads)
    return json.dumps(threads)


def write_frames(
    path: Path, shown: list[list[Stack]], loaders: list[list[Stack]], chance: random.Random
) -> int:
    """All that the controller is sent for one look; the bytes of it."""
    texts = {copies[0].fingerprint: copies[0] for copies in (*shown, *loaders)}
    sent = StacksSent(machine=MachineId("m0"), action="1", look=1, stacks=tuple(texts.values()))
    size = 0
    with path.open("wb") as file:
        for at in range(GRID.machines):
            answer = wire.encode_report(machine_stacks(at, shown, loaders, chance))
            size += _write(file, answer)
        size += _write(file, wire.encode_report(sent))
    return size


def _write(file: Any, body: bytes) -> int:
    data = wire.encode(wire.Bare(ack=1, body=body))
    written: int = file.write(LENGTH.pack(len(data)) + data)
    return written


def machine_stacks(
    at: int, shown: list[list[Stack]], loaders: list[list[Stack]], chance: random.Random
) -> MachineStacks:
    """What one machine answers. Its ranks are one stage of one replica."""
    replica, stage = divmod(at, GRID.stages)
    place = 0
    if replica == STUCK:
        place = {GRID.stages - 2: 2, GRID.stages - 1: 3}.get(stage, 1)
    ranks = []
    for rank in range(at * PER_MACHINE, (at + 1) * PER_MACHINE):
        rank_shows = _shown(chance.choice(shown[place]), chance)
        child = Child(role=Role.LOADER, shown=_shown(chance.choice(loaders[place]), chance))
        posture = Posture(rank=rank_shows, children=(child,))
        ranks.append(RankLook(rank=Rank(rank), posture=posture, pid=chance.randrange(1 << 22)))
    return MachineStacks(
        machine=MachineId(f"m{at}"),
        action=f"1.{at}",
        generation=Generation(1),
        look=1,
        ranks=tuple(ranks),
        stood=tuple(standings(at, stage, waits=place == 0)),
        took_s=0.4,
    )


def _shown(stack: Stack, chance: random.Random) -> Shown:
    return Shown(
        stack=stack.fingerprint, state=chance.choice("SSSR"), wchan=chance.choice(WAITS_IN)
    )


def standings(at: int, stage: int, *, waits: bool) -> Iterator[Stood]:
    """Of each rank in its data group, and of all of them in their tensor group."""
    first = at * PER_MACHINE
    call = ((41, Call(op="all_reduce", numel_in=64, dtype="Float")),)
    for local in range(PER_MACHINE):
        yield Stood(
            group=f"dp{stage}.{local}",
            enqueued=41 if waits else 40,
            completed=40,
            calls=call if waits else (),
            ranks=((first + local, first + local),),
        )
    whole = ((first, first + PER_MACHINE - 1),)
    yield Stood(group=f"tp{at}", members=whole, enqueued=960, completed=960, ranks=whole)


# --- time -----------------------------------------------------------------------------------------


def machine_seconds(ranks: list[str], workers: list[str]) -> float:
    """To read all dumps of one machine and to name what they show."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for local in range(PER_MACHINE):
            for text, role in ((ranks[local % RANKS], ""), (workers[0], Role.LOADER)):
                (dump,) = read(text, "dump.json") or []
                fingerprint_of(dump.threads, role)
        times.append(time.perf_counter() - began)
    return median(times)


def judge(path: Path) -> dict[str, Any]:
    """One run in a process of its own."""
    script = Path(__file__).with_name("aggregate_judge.py")
    command = [sys.executable, str(script), str(path), str(GRID.replicas)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the judge ended with {process.returncode}")
    found: dict[str, Any] = json.loads(said)
    return found | {"peak_rss_bytes": usage.ru_maxrss * 1024}


if __name__ == "__main__":
    main()
