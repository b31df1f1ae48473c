"""What becomes of a stand-in that a monitor accuses wrongly: evicted, tested, back, and woken."""

from __future__ import annotations

import signal
from pathlib import Path

from everstep.controller.gate import FINDINGS
from everstep.controller.views import StatusView
from everstep.core.state import Phase
from everstep.model import PolicySpec
from everstep.processes import send_signal
from tests.integration.support import STEPS, Job, job
from tests.integration.test_checks import _finding, _tell

SOON = PolicySpec(retest_after_s=1.0)


def test_a_machine_that_passes_its_tests_comes_back_and_trains(tmp_path: Path) -> None:
    with job(tmp_path, STEPS, standbys=1, policy=SOON) as running:
        running.start()
        running.wait(lambda s: len(s.machines) == 3 and _advances(s), "all machines")
        keeper = running.service("m1", "keeper")
        assert keeper is not None

        _tell(running, FINDINGS, {"findings": [_finding("m1", "evict")]})
        running.wait(lambda s: s.generation == 2 and _advances(s), "training without m1")
        assert running.machine("m2").node_rank == 1
        _wait_for(running, "m1", "standby")
        status = _wait_for(running, "m3", "standby")
        assert status.generation == 2, "nothing was stopped for it"
        assert running.service("m1", "keeper") == keeper, "it was never taken away"

        # Both members are lost, and nobody is left but the two that wait.
        for name in ("m0", "m2"):
            lost = running.service(name, "keeper")
            assert lost is not None
            send_signal(lost, signal.SIGKILL)
        running.wait(lambda s: s.generation > 2 and _advances(s), "training with m1 again")
        assert {running.machine(name).node_rank for name in ("m1", "m3")} == {0, 1}
        assert running.service("m1", "keeper") == keeper


def _advances(status: StatusView) -> bool:
    return status.phase is Phase.RUNNING and status.finished_by_all > 0


def _wait_for(running: Job, machine: str, condition: str) -> StatusView:
    def holds(status: StatusView) -> bool:
        found = [m.condition for m in status.machines if m.machine == machine]
        return found == [condition]

    return running.wait(holds, f"{machine} to be {condition}")
