"""Evictions in whole jobs: machines that are lost, and one whose ranks say what broke."""

from __future__ import annotations

from pathlib import Path

from tests.integration.command import wait_until
from tests.integration.versioned import started


def test_two_machines_at_once_exhaust_the_pool(tmp_path: Path) -> None:
    """The standby takes one position, and only the other machine is waited for."""
    with started(tmp_path, machines=3, standbys=1) as job:
        job.trains_on(20)
        for name in ("m1", "m2"):
            assert job.everstep("inject", "lose-machine", "j", "--machine", name).code == 0
        wait_until(lambda: job.incidents() and job.runs(), "the restart")
        job.trains_on(20)
        members = job.positions()
        assert members["m0"] == 0, "who stays keeps its position"
        taken = sorted(name for name, position in members.items() if position is not None)
        assert {"m0", "m3"} < set(taken)
        assert len(taken) == 3
        assert all(rung == "evict" for rung in job.rungs())


BAD_ON_M1 = """
import json, os

MACHINE = json.loads(os.environ["EVERSTEP_ATTACH"])["machine"]

def loss_of(step, since):
    if step > 40 and MACHINE == "m1":
        print("RuntimeError: CUDA error: uncorrectable ECC error encountered", flush=True)
        os.abort()
    return 2.5
"""


def test_a_bad_machine_crashes_every_rank_put_on_it_until_it_goes(tmp_path: Path) -> None:
    """Its ranks say what broke: a standby takes its position, and it is tested meanwhile."""
    with started(tmp_path, standbys=1, kernels=BAD_ON_M1) as job:
        wait_until(lambda: job.finished() >= 60, "steps that m1 would not do")
        assert job.rungs() == ["evict"]
        (incident,) = job.incidents()
        assert incident.evicted == ("m1",)
        positions = job.positions()
        assert (positions["m0"], positions["m1"], positions["m2"]) == (0, None, 1)
        (eviction,) = job.evictions()
        assert (eviction.machine, eviction.guilty) == ("m1", None)
        wait_until(lambda: job.evictions()[0].tests, "a test")
