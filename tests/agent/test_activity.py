"""Whether ranks do anything, from real processes, their logs, and the network's counters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from everstep.agent import activity
from everstep.agent.activity import BLIND_S, Activity
from everstep.agent.checks.check import Here
from everstep.agent.traffic import Counters, Kind, Traffic, counted, grown
from everstep.agent.watch import Watched
from everstep.core.agent_io import ActivityRead
from everstep.model import Generation, Rank
from everstep.processes import identify
from tests.agent.checks.net.trees import port, write
from tests.agent.support import wait_for

BUSY = """
import time
print('up', flush=True)
while True:
    end = time.monotonic() + 0.005
    while time.monotonic() < end:
        pass
    time.sleep(0.045)
"""
SLEEPS = "import time\nprint('up', flush=True)\nwhile True: time.sleep(60)"
PRINTS = """
import time
while True:
    print('step', flush=True)
    time.sleep(0.05)
"""
PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, '-c', {BUSY!r}], stdout=subprocess.DEVNULL)
print('up', flush=True)
time.sleep(600)
"""
PAIR = """
import os, sys, time
import torch, torch.distributed as dist
child = os.fork()
rank = 0 if child else 1
dist.init_process_group('gloo', init_method=f'file://{sys.argv[1]}', rank=rank, world_size=2)
part = torch.ones(1 << 18)
dist.all_reduce(part)
if child:
    print(child, flush=True)
while True:
    dist.all_reduce(part)
    time.sleep(0.02)
"""


class Looked:
    """Looks at real processes, on a clock of its own: a second of it passes when told so."""

    def __init__(self, directory: Path, count: Callable[[], Counters]) -> None:
        self.directory = directory
        self.count = count
        self.ranks: list[Watched] = []
        self.activity = Activity(lambda _, rank: directory / f"rank-{rank}.log", count)

    def look(self) -> ActivityRead | None:
        return self.activity.look(self.ranks, time.monotonic())

    def until(self, what: str, holds: Callable[[ActivityRead], bool]) -> ActivityRead:
        """Look often until it holds."""

        def once() -> ActivityRead | None:
            time.sleep(0.1)
            read = self.look()
            return read if read is not None and holds(read) else None

        return wait_for(what, once, 60.0)


Start = Callable[..., Watched]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Start]:
    """Starts ranks whose output goes to their logs."""
    with ExitStack() as ending:

        def start(program: str, rank: int = 0, *words: str) -> Watched:
            with (tmp_path / f"rank-{rank}.log").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-c", program, *words],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            ending.callback(process.wait)
            ending.callback(os.killpg, process.pid, signal.SIGKILL)
            wait_for("its first line", lambda: (tmp_path / f"rank-{rank}.log").stat().st_size)
            named = identify(process.pid)
            assert named is not None
            return Watched(Rank(rank), Generation(1), named)

        yield start


def no_network() -> Counters:
    return {}


def test_a_rank_that_only_sleeps_is_quiet_and_one_that_prints_is_not(
    tmp_path: Path, started: Start
) -> None:
    looked = Looked(tmp_path, no_network)
    looked.ranks = [started(SLEEPS)]
    assert looked.look() is None, "one look alone tells nothing"
    read = looked.until("quiet", lambda read: read.quiet_s > 1.0)
    assert read.generation == 1
    assert read.no_traffic_s is None
    assert read.idle_s is not None
    assert read.idle_s >= read.quiet_s
    looked.ranks.append(started(PRINTS, 1))
    looked.until("output", lambda read: read.quiet_s == 0.0 and read.idle_s != 0.0)


def test_a_rank_that_computes_is_not_quiet_though_it_prints_nothing(
    tmp_path: Path, started: Start
) -> None:
    looked = Looked(tmp_path, no_network)
    looked.ranks = [started(BUSY), started(SLEEPS, 1)]
    looked.until("busy", lambda read: read.idle_s == 0.0 and read.quiet_s == 0.0)
    os.kill(looked.ranks[0].process.pid, signal.SIGSTOP)
    looked.until("stopped and quiet", lambda read: read.quiet_s > 1.0)
    os.kill(looked.ranks[0].process.pid, signal.SIGCONT)
    looked.until("busy again", lambda read: read.quiet_s == 0.0)


def test_a_child_that_works_speaks_for_its_rank(
    tmp_path: Path, started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is searched for only when the rank itself seems to do nothing."""
    monkeypatch.setattr(activity, "CHILDREN_FROM_S", 0.5)
    monkeypatch.setattr(activity, "CHILDREN_EVERY_S", 0.5)
    looked = Looked(tmp_path, no_network)
    looked.ranks = [started(PARENT)]
    idle = looked.until("seems idle", lambda read: (read.idle_s or 0.0) > 0.3)
    assert idle.quiet_s > 0
    looked.until("its child", lambda read: read.idle_s == 0.0)


def test_a_pair_over_gloo_is_quiet_once_one_of_it_is_stopped(
    tmp_path: Path, started: Start
) -> None:
    """The other one waits for it in a collective. Their traffic ceases on the real loopback."""
    looked = Looked(tmp_path, partial(counted, Here(), loopback=True))
    first = started(PAIR, 0, str(tmp_path / "store"))
    child = identify(int((tmp_path / "rank-0.log").read_text()))
    assert child is not None
    looked.ranks = [first, first._replace(rank=Rank(1), process=child)]
    looked.until("traffic", lambda read: read.no_traffic_s is not None and read.idle_s == 0.0)
    os.kill(looked.ranks[1].process.pid, signal.SIGSTOP)
    looked.until("quiet", lambda read: read.quiet_s > 1.0)


def test_another_generation_and_a_long_pause_of_the_agent_begin_anew(
    tmp_path: Path, started: Start
) -> None:
    looked = Looked(tmp_path, no_network)
    rank = started(SLEEPS)
    looked.ranks = [rank]
    look, now = looked.activity.look, 1000.0
    assert look(looked.ranks, now) is None
    read = look(looked.ranks, now + 1)
    assert read is not None
    assert read.quiet_s == 1.0
    assert look(looked.ranks, now + 2 + BLIND_S) is None
    read = look(looked.ranks, now + 3 + BLIND_S)
    assert read is not None
    assert read.quiet_s == 1.0
    again = [rank._replace(generation=Generation(2))]
    assert look(again, now + 4 + BLIND_S) is None
    assert look([], now + 5 + BLIND_S) is None


# --- the network ---------------------------------------------------------------------------------


def net_dev(here: Here, **bytes_: int) -> None:
    head = "Inter-|   Receive                     |  Transmit\n face |bytes packets ...|bytes ..."
    lines = [
        f"{name:>6}: {each} 5 0 0 0 0 0 0 {each} 5 0 0 0 0 0 0" for name, each in bytes_.items()
    ]
    write(here.path("/proc/net"), {"dev": "\n".join([head, *lines])})


def test_counters_of_rdma_ports_and_interfaces_are_bytes(tmp_path: Path) -> None:
    here = Here(root=str(tmp_path))
    assert counted(here, loopback=True) == {Kind.RDMA: {}, Kind.INTERFACES: {}}
    port(here, "mlx5_0", counters__port_xmit_data=100, counters__port_rcv_data=50)
    port(here, "mlx5_1", counters__port_xmit_data=0xFFFFFFFF, counters__port_rcv_data="garbage")
    port(here, "efa_0", hw_counters__tx_bytes=7, hw_counters__rx_bytes=8)
    net_dev(here, lo=1000, eth0=30)
    found = counted(here, loopback=False)
    assert sum(found[Kind.RDMA].values()) == 4 * 150 + 15
    assert found[Kind.INTERFACES] == {"eth0": 60}
    assert counted(here, loopback=True)[Kind.INTERFACES] == {"eth0": 60, "lo": 2000}


def test_what_grew_is_counted_over_what_can_be_compared() -> None:
    assert grown({"a": 5, "b": 9}, {"a": 8, "b": 2, "c": 70}) == 3
    assert grown({}, {"a": 8}) is None


def test_rdma_that_falls_silent_is_quiet_though_ranks_spin_and_others_use_the_network(
    tmp_path: Path, started: Start
) -> None:
    """As ranks do that wait in a collective of NCCL."""
    here = Here(root=str(tmp_path / "root"))
    port(here, "mlx5_0", counters__port_xmit_data=0, counters__port_rcv_data=0)
    net_dev(here, eth0=0)
    looked = Looked(tmp_path, partial(counted, here, loopback=False))
    looked.ranks = [started(BUSY)]
    sent = 0

    def carry(read: ActivityRead) -> bool:
        nonlocal sent
        sent += 1 << 20
        port(here, "mlx5_0", counters__port_xmit_data=sent, counters__port_rcv_data=0)
        net_dev(here, eth0=sent)
        return read.no_traffic_s is not None

    looked.until("traffic", carry)

    def silent(read: ActivityRead) -> bool:
        nonlocal sent
        sent += 1 << 20
        net_dev(here, eth0=sent)
        return read.quiet_s > 1.0 and read.idle_s == 0.0

    read = looked.until("silence", silent)
    assert read.no_traffic_s is not None
    assert read.no_traffic_s >= read.quiet_s


def test_ranks_that_never_had_traffic_are_not_called_silent(tmp_path: Path, started: Start) -> None:
    here = Here(root=str(tmp_path / "root"))
    port(here, "mlx5_0", counters__port_xmit_data=10, counters__port_rcv_data=10)
    looked = Looked(tmp_path, partial(counted, here, loopback=False))
    looked.ranks = [started(BUSY)]
    begun = time.monotonic()
    read = looked.until(
        "busy after a while", lambda read: time.monotonic() - begun > 1.0 and read.idle_s == 0.0
    )
    assert read.no_traffic_s is None
    assert read.quiet_s == 0.0


def test_counters_that_do_not_answer_keep_nobody_waiting() -> None:
    answer = threading.Event()

    def count() -> Counters:
        answer.wait()
        return {}

    traffic = Traffic(count)
    traffic.begin()
    traffic.begin()
    assert traffic.newest is None
    answer.set()
    assert wait_for("the answer", lambda: traffic.newest).counters == {}
