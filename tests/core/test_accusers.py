"""The guards: who is evicted, as what, and what speaks against it."""

from __future__ import annotations

import pytest

from everstep.core.accusers import Group, groups_of, named, ready_standbys
from everstep.core.alerts import accusations, alert_cleared, alert_raised
from everstep.core.state import Expelled, State
from everstep.diagnosis.words import Verdict
from everstep.events import AlertCleared, AlertRaised
from everstep.health import Alert, Counts, Result
from everstep.model import MachineId, Seconds
from tests.transcripts.transcript import Transcript


def job(members: str, standbys: str = "") -> State:
    """Machines, each given as NUMBER@SWITCH/KERNEL."""
    transcript = Transcript()
    count, spare = len(members.split()), len(standbys.split())
    text = f"> 0 job nnodes={count} nproc=1 standbys={spare} disk_every=0\n"
    for each in f"{members} {standbys}".split():
        name, _, place = each.partition("@")
        switch, _, kernel = place.partition("/")
        text += f"> 1 join m{int(name):03} shard_port=7000"
        text += f" units=switch:{switch}" if switch else ""
        text += f" boot_id={kernel}\n" if kernel else "\n"
    transcript.run(text)
    return transcript.core.state


def accuse(state: State, names: str, now: Seconds = 10.0, **more: str) -> None:
    for name in names.split():
        result = Result(
            check=more.get("check", "gpu.lost"),
            verdict=Verdict.EVICT,
            why="it is broken",
            cause=more.get("cause", ""),
        )
        alert = Alert(result=result, source=more.get("source", "agent"))
        alert_raised(state, AlertRaised(machine=MachineId(f"m{int(name):03}"), alert=alert), now)


def groups(state: State, now: Seconds) -> list[Group]:
    return groups_of(state, accusations(state, now), now)


def shown(state: State, now: Seconds = 10.0) -> list[tuple[str, str, str]]:
    """Names without zeros, the unit, and what speaks against it."""
    return [
        (" ".join(str(int(name[1:])) for name in group.machines), group.unit, group.against)
        for group in groups(state, now)
    ]


def range_of(first: int, end: int, place: str = "") -> str:
    return " ".join(f"{number}{place}" for number in range(first, end))


def test_each_machine_goes_by_itself_while_standbys_last() -> None:
    state = job("0 1 2", "3")
    accuse(state, "0 1")
    assert shown(state) == [("0", "", ""), ("1", "", "no standby is ready")]


def test_more_than_a_few_are_not_the_machines() -> None:
    state = job(range_of(0, 4), range_of(4, 8))
    accuse(state, "0 1")
    assert [against for _, _, against in shown(state)] == ["", ""]
    accuse(state, "2")
    ((who, _, against),) = shown(state)
    assert who == "0 1 2"
    assert "3 machines were accused within 5 minutes, which is not the machines" in against


def test_of_a_large_job_a_tenth_may_go() -> None:
    state = job(range_of(0, 50), range_of(50, 60))
    accuse(state, "0 1 2 3 4")
    assert [against for _, _, against in shown(state)] == [""] * 5
    accuse(state, "5")
    assert [len(who.split()) for who, _, _ in shown(state)] == [6]


def test_accusations_long_after_each_other_are_independent() -> None:
    """Three machines broke on three days, and no standby came: then some do, and two may go."""
    state = job("0 1 2 3")
    for day, name in enumerate("012"):
        accuse(state, name, 10.0 + day * 86400)
    now = 300_000.0
    assert [against for _, _, against in shown(state, now)] == ["no standby is ready"] * 3
    standbys = job("0 1 2 3", "4 5 6 7")
    for name, machine in standbys.machines.items():
        state.machines.setdefault(name, machine)
    found = shown(state, now)
    assert [who for who, _, against in found if not against] == ["0", "1"]
    assert "not the machines" in found[-1][2]


def test_who_went_lately_counts() -> None:
    state = job("0 1 2", "3 4 5")
    state.expelled = [
        Expelled(machine=MachineId("a"), at=5.0, unit=""),
        Expelled(machine=MachineId("b"), at=6.0, unit="switch:x"),
        Expelled(machine=MachineId("c"), at=6.0, unit="switch:x"),
    ]
    accuse(state, "0")
    assert "3 machines were accused" in shown(state)[0][2]
    assert shown(state, 305.5) == [("0", "", "")]


def test_who_took_it_back_counts_for_a_while() -> None:
    """When a storage comes back, the last two to say so would else be evicted."""
    state = job("0 1 2 3 4", "5 6 7")
    accuse(state, "0 1 2", cause="nfs server:/data")
    alert_cleared(state, AlertCleared(machine=MachineId("m000"), check="gpu.lost"), 20.0)
    ((who, _, against),) = shown(state, 21.0)
    assert who == "1 2"
    assert "all of them name nfs server:/data" in against
    assert [against for _, _, against in shown(state, 330.0)] == ["", ""]


def test_two_machines_that_are_the_job_and_lose_the_same_storage_stay() -> None:
    """A server that is started anew for 90 s is no fault of the machines, however few they are."""
    state = job("0 1", "2 3")
    accuse(state, "0 1", cause="storage store")
    ((who, _, against),) = shown(state)
    assert who == "0 1"
    assert "2 machines were accused within 5 minutes" in against
    assert "all of them name storage store" in against
    apart = job("0 1", "2 3")
    accuse(apart, "0", cause="storage store")
    accuse(apart, "1", cause="driver 570.86")
    assert [against for _, _, against in shown(apart)] == ["", ""]
    alone = job("0", "1")
    accuse(alone, "0", cause="storage store")
    assert shown(alone) == [("0", "", "")]
    few = job("0 1 2 3 4", "5 6")
    accuse(few, "0 1", cause="storage store")
    assert [against for _, _, against in shown(few)] == ["", ""], "three have it"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"cause": "driver 570.86"}, "all of them name driver 570.86"),
        ({"source": "alertmanager"}, "alertmanager alone says all of it"),
        ({}, "a switch, a driver, the code"),
    ],
)
def test_what_too_many_have_in_common_is_named(more: dict[str, str], said: str) -> None:
    state = job("0 1 2 3")
    accuse(state, "0 1 2", 10.0, **more)
    assert shown(state)[0][2].endswith(f"which is not the machines: {said}")


def test_a_unit_that_cannot_go_as_one_is_named() -> None:
    state = job(range_of(0, 4, "@leaf1"), range_of(4, 8, "@leaf1"))
    accuse(state, "0 1 2")
    assert shown(state)[0][2].endswith("all of them are of switch:leaf1")


# --- units ---


def test_most_of_a_switch_is_the_switch() -> None:
    state = job(
        range_of(0, 4, "@leaf1") + " " + range_of(4, 8, "@leaf2"), range_of(8, 12, "@leaf3")
    )
    accuse(state, "0 1 2")
    ((who, unit, against),) = shown(state)
    assert (who, unit, against) == ("0 1 2 3", "switch:leaf1", "")


def test_half_of_a_switch_is_not() -> None:
    state = job(range_of(0, 4, "@leaf1"), range_of(8, 12, "@leaf3"))
    accuse(state, "0 1")
    assert [unit for _, unit, _ in shown(state)] == ["", ""]


def test_one_outside_of_the_switch_is_chance_and_more_are_not() -> None:
    members = range_of(0, 4, "@leaf1") + " " + range_of(4, 12, "@leaf2")
    state = job(members, range_of(12, 20, "@leaf3"))
    accuse(state, "0 1 2 4")
    assert [unit for _, unit, _ in shown(state)] == ["switch:leaf1", ""]
    accuse(state, "5")
    assert [unit for _, unit, _ in shown(state)] == [""]


def test_old_accusations_do_not_make_a_unit() -> None:
    state = job(range_of(0, 2, "@leaf1") + " " + range_of(2, 4, "@leaf2"))
    accuse(state, "0", 10.0)
    accuse(state, "1", 1000.0)
    assert [unit for _, unit, _ in shown(state, 1000.0)] == ["", ""]


def test_a_strike_on_the_others_counts_for_their_switch_if_it_is_about_links() -> None:
    state = job(range_of(0, 4, "@leaf1"), range_of(4, 8, "@leaf2"))
    link = Result(check="net.link", verdict=Verdict.WARN, why="down", counts=Counts.TWICE)
    for name in ("m000", "m001", "m002"):
        alert_raised(state, AlertRaised(machine=MachineId(name), alert=Alert(result=link)), 10.0)
    accuse(state, "0", 11.0)
    assert shown(state, 11.0) == [("0", "", "")]
    alert_cleared(state, AlertCleared(machine=MachineId("m000"), check="gpu.lost"), 12.0)
    alert_raised(state, AlertRaised(machine=MachineId("m000"), alert=Alert(result=link)), 40.0)
    assert shown(state, 40.0) == [("0 1 2 3", "switch:leaf1", "")]


# --- kernels ---


def test_a_kernel_is_one_accuser_of_all_that_run_on_it() -> None:
    state = job("0@/k1 1@/k1 2@/k2", "3@/k1 4@/k2 5@/k2")
    accuse(state, "0 1 3", cause="boot k1")
    assert shown(state) == [("0 1 3", "boot k1", "")]


def test_standbys_on_the_same_kernel_are_no_way_out() -> None:
    state = job("0@/k1 1@/k1", "2@/k1")
    accuse(state, "0", cause="boot k1")
    assert shown(state) == [("0 1 2", "boot k1", "the standbys run on the same kernel")]


def test_a_device_of_a_host_is_one_accuser_of_those_that_use_it() -> None:
    state = job("0@/k1 1@/k1 2@/k1 3@/k1", "4@/k2 5@/k1 6@/k2")
    accuse(state, "1", cause="boot k1 0000:3b:00.0", check="kernel.xid")
    assert shown(state) == [("1", "", "")], "the others do not say that they use it"
    accuse(state, "2", cause="boot k1 0000:3b:00.0", check="kernel.xid")
    assert shown(state) == [("1 2", "boot k1 0000:3b:00.0", "")]
    accuse(state, "3", cause="boot k1 0000:5e:00.0", check="kernel.xid")
    assert shown(state)[1:] == [("3", "", "")]


def test_standbys_with_the_same_device_are_no_way_out() -> None:
    state = job("0@/k1 1@/k1", "2@/k1 3@/k1")
    accuse(state, "0 1 2 3", cause="boot k1 0000:3b:00.0", check="kernel.xid")
    same = "the standbys share it"
    assert shown(state) == [("0 1 2 3", "boot k1 0000:3b:00.0", same)]
    accuse(state, "0", cause="boot k1")
    assert shown(state) == [
        ("0 1 2 3", "boot k1", "the standbys run on the same kernel"),
        ("0 1 2 3", "boot k1 0000:3b:00.0", same),
    ]


def test_who_goes_with_its_kernel_goes_once() -> None:
    state = job("0@/k1 1@/k1 2@/k2", "3@/k2 4@/k2")
    accuse(state, "0 1", cause="boot k1 sda", check="kernel.log")
    accuse(state, "1", cause="boot k1")
    assert shown(state) == [("0 1", "boot k1", "")]


def test_a_machine_on_such_a_kernel_can_still_go_for_its_own_sake() -> None:
    state = job("0@/k1 1@/k1", "2@/k2")
    accuse(state, "0", cause="boot k1", check="kernel.fault")
    accuse(state, "1")
    assert [(who, unit) for who, unit, against in shown(state) if not against] == [("1", "")]


def test_the_kernel_of_one_machine_is_that_machine() -> None:
    state = job("0@/k1 1@/k2", "2@/k3")
    accuse(state, "0", cause="boot k1")
    assert shown(state) == [("0", "", "")]


def test_standbys_that_a_check_doubts_are_not_ready() -> None:
    state = job("0 1", "2 3")
    doubt = Result(check="gpu.rows", verdict=Verdict.SUSPECT, why="a row is to be remapped")
    alert_raised(state, AlertRaised(machine=MachineId("m002"), alert=Alert(result=doubt)), 10.0)
    assert [m.machine for m in ready_standbys(state, 10.0)] == ["m003"]


def test_very_many_names_are_cut() -> None:
    assert named([MachineId(f"m{n}") for n in range(9)]).endswith("m5 and 3 more")
