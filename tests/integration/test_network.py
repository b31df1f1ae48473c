"""Real links, cut under a real training job: who is cut off is replaced, who flaps once is not."""

from __future__ import annotations

import time
from pathlib import Path

from everstep.core.state import Phase
from everstep.events import AlertRaised, MachineProbed
from tests.integration.network import ETH, RAIL
from tests.integration.spread import Size, Spread, over, spread

SAFE = 100
"""Steps, five seconds of them: by then every shard lies in the memory of two machines."""


def test_a_host_that_is_cut_off_is_confirmed_by_its_peers_and_replaced(tmp_path: Path) -> None:
    with spread(tmp_path, Size(nnodes=3, standbys=1)) as job:
        job.start(over(ETH))
        victim = job.machine(job.host_at(2))
        job.wait(lambda status: status.finished_by_all > SAFE, "peers hold a step")
        job.net.cut(job.host_at(2))
        job.wait(
            lambda s: (
                s.phase is Phase.RUNNING and s.generation > 1 and s.finished_by_all > s.restored
            ),
            "the job trains again",
        )
        (incident,) = job.incidents()
        assert incident.evicted == (victim.machine,)
        probes = [r.event for r in job.records() if isinstance(r.event, MachineProbed)]
        assert probes
        assert not any(probe.reachable for probe in probes)
        assert "cannot reach it" in incident.symptom
        assert incident.restored is not None
        assert incident.restored > 0, "the peer's memory had a step"


def test_a_training_link_may_flap_once_and_is_replaced_the_second_time(tmp_path: Path) -> None:
    with spread(tmp_path, Size(nnodes=2, standbys=1)) as job:
        job.start(over(RAIL))
        host = job.host_at(1)
        victim = job.machine(host).machine
        _flap(job, host)
        job.wait(lambda _: len(_alerts(job, victim)) == 1, "the first flap is told")
        before = job.wait(lambda status: True, "a status")
        job.wait(lambda s: s.finished_by_all > before.finished_by_all + 20, "training goes on")
        assert not job.incidents()
        job.net.cut(host, RAIL)
        job.wait(
            lambda s: (
                s.phase is Phase.RUNNING and s.generation > 1 and s.finished_by_all > s.restored
            ),
            "the job trains again",
        )
        (incident,) = job.incidents()
        assert incident.evicted == (victim,)
        assert RAIL in incident.symptom
        assert len(_alerts(job, victim)) >= 2


def _flap(job: Spread, host: int) -> None:
    job.net.cut(host, RAIL)
    time.sleep(0.3)
    job.net.mend(host, RAIL)


def _alerts(job: Spread, machine: str) -> list[AlertRaised]:
    events = [record.event for record in job.records()]
    raised = [event for event in events if isinstance(event, AlertRaised)]
    return [e for e in raised if e.machine == machine and e.alert.result.check == "net.link"]
