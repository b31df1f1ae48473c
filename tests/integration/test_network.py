"""Real links, cut under a real training job: who is cut off is replaced, who flaps once is not.

Every host is on a leaf switch of its own. One that fails leaves the carrier of its host as it was:
packets are lost, and nobody gets an error.
"""

from __future__ import annotations

import time
from pathlib import Path

from everstep.core.state import Phase
from everstep.events import AlertRaised, MachineProbed
from everstep.sightings import StacksTaken
from tests.integration.network import ETH, RAIL
from tests.integration.spread import Size, Spread, over, spread

SAFE = 60
"""Steps, three seconds of them: by then every shard lies in the memory of two machines."""


def test_a_link_may_flap_once_and_a_host_that_nobody_reaches_is_replaced(tmp_path: Path) -> None:
    size = Size(nnodes=3, standbys=3)
    with spread(tmp_path, size, leaves=sum(size)) as job:
        job.start(over(RAIL), "--backup-interface", RAIL, "--stall-limit", "3")
        flapping, cut_off = job.host_at(1), job.host_at(2)
        _once_is_tolerated(job, flapping)
        _nobody_gets_an_error(job, cut_off)
        _nobody_reaches_it(job, job.host_at(2))
        _the_second_time_it_goes(job, flapping)


def _once_is_tolerated(job: Spread, host: int) -> None:
    job.wait(lambda status: status.finished_by_all > SAFE, "peers hold a step")
    job.net.cut(host, RAIL)
    time.sleep(0.3)
    job.net.mend(host, RAIL)
    told = job.wait(lambda _: len(_alerts(job, host)) == 1, "the flap is told")
    job.wait(lambda s: s.finished_by_all > told.finished_by_all + 20, "training goes on")
    assert not job.incidents()


def _nobody_gets_an_error(job: Spread, host: int) -> None:
    """All ranks wait for each other, its agent answers, and only what moves data is cut."""
    victim = job.machine(host).machine
    job.net.switch_down(job.net.leaf_of(host), RAIL)
    _trains_again(job, generation=2)
    (incident,) = job.incidents()
    assert incident.evicted == (victim,)
    taken = [r.event for r in job.records() if isinstance(r.event, StacksTaken)]
    assert any(victim in pair for event in taken for pair in event.unreached)


def _nobody_reaches_it(job: Spread, host: int) -> None:
    victim = job.machine(host).machine
    for interface in (ETH, RAIL):
        job.net.cut(host, interface)
    _trains_again(job, generation=3)
    _, incident = job.incidents()
    assert incident.evicted == (victim,)
    probes = [r.event for r in job.records() if isinstance(r.event, MachineProbed)]
    assert probes
    assert not any(probe.reachable for probe in probes)
    assert "cannot reach it" in job.machine(host).why
    assert incident.restored is not None
    assert incident.restored > 0, "the peer's memory had a step"


def _the_second_time_it_goes(job: Spread, host: int) -> None:
    victim = job.machine(host).machine
    job.net.cut(host, RAIL)
    time.sleep(0.3)
    job.net.mend(host, RAIL)
    _trains_again(job, generation=4)
    *_, incident = job.incidents()
    assert incident.evicted == (victim,)
    assert RAIL in incident.symptom
    assert "for the second time" in incident.symptom


def _trains_again(job: Spread, generation: int) -> None:
    job.wait(
        lambda s: (
            s.phase is Phase.RUNNING
            and s.generation == generation
            and s.finished_by_all > s.restored
            and s.incident is None
        ),
        "the job trains again, and that is proven",
    )


def _alerts(job: Spread, host: int) -> list[AlertRaised]:
    machine = job.machine(host).machine
    events = [record.event for record in job.records()]
    raised = [event for event in events if isinstance(event, AlertRaised)]
    return [e for e in raised if e.machine == machine and e.alert.result.check == "net.link"]
