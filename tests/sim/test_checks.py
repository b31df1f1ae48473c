"""Larger worlds in which checks speak, rightly and wrongly, and cables are pulled."""

from __future__ import annotations

import re
import statistics

import msgspec
import pytest

import everstep.core.evicting
from everstep.actions import Outcome
from everstep.core.accusers import Group
from everstep.core.alerts import Accusation
from everstep.core.state import State
from everstep.model import CheckpointSpec, Every, PolicySpec, Seconds
from everstep.sim.options import MANY, Harm, Options
from everstep.sim.run import RunFailed, run
from tests.sim.test_seeds import mild

CHECKS = (Harm.ALERT, Harm.ALERT_MANY, Harm.FLAP)
VERDICT = r"GiveVerdict .*guilty=(True|False)"


def checked(seed: int, *harms: Harm, nnodes: int = 6, standbys: int = 6) -> Options:
    """Much is said, and there are standbys to act on it."""
    options = mild(seed, *harms)
    spec = msgspec.structs.replace(
        options.spec,
        nnodes=nnodes,
        layout=None,
        elastic=None,
        nproc_per_node=1,
        standbys=standbys,
        checkpoint=CheckpointSpec(directory="/checkpoints", disk_every=Every(steps=10)),
        policy=PolicySpec(recoveries_max=MANY),
    )
    return msgspec.structs.replace(
        options,
        spec=spec,
        steps=150,
        step_s=1.0,
        slow=0.0,
        kernel_of=(2, 3, 1, 100)[seed % 4],
        harm_every_s=10.0,
        safety_s=150.0,
    )


def told(seeds: range, *harms: Harm) -> str:
    """Everything that happens in these runs, all of which keep every promise."""
    lines: list[str] = []
    for seed in seeds:
        report = run(checked(seed, *harms), lines.append)
        assert report.outcome is Outcome.FINISHED, report
    return "\n".join(lines)


def test_all_that_checks_can_lead_to_happens_and_every_job_ends_well() -> None:
    said = told(range(17), *CHECKS)
    for what in (
        "EvictMachine cause",
        "unit=switch:leaf",
        "unit=boot kernel-",
        "PageHuman",
        "about=accused: many",
        "about=alert: host.mount",
        "for the second time in",
    ):
        assert what in said, what


def test_who_cannot_be_reached_goes_within_seconds() -> None:
    said = told(range(8), Harm.ISOLATE)
    assert "accused=True" not in said
    waits = [float(s) for s in re.findall(r"EvictMachine .*silent for (\d+) s, nothing adv", said)]
    assert len(waits) > 5
    assert statistics.median(waits) < 12


def test_nobody_is_asked_about_who_is_silent_while_training_advances() -> None:
    said = told(range(8), Harm.CUT_OFF, Harm.KILL_AGENT)
    assert "MachineSilent" in said
    assert "ProbeMachine" not in said


def test_who_is_asked_tells_a_cut_cable_from_a_silent_agent() -> None:
    said = told(range(8), Harm.CUT_OFF, Harm.ISOLATE)
    assert "reachable=True" in said
    assert "reachable=False" in said


def test_evicted_machines_are_tested_return_and_train_again() -> None:
    """Wrongly accused ones come back; those that are broken do not, whatever their name is now."""
    seen: set[str] = set()
    for seed in range(12):
        options = checked(seed, Harm.ALERT, Harm.ISOLATE, nnodes=3, standbys=2)
        policy = msgspec.structs.replace(
            options.spec.policy, retest_after_s=5.0, evictions_max=3 if seed % 2 else MANY
        )
        spec = msgspec.structs.replace(options.spec, policy=policy)
        often = msgspec.structs.replace(options, spec=spec, harm_every_s=4.0, hosts_again=0.5)
        lines: list[str] = []
        assert run(often, lines.append).outcome is Outcome.FINISHED
        seen |= _what_became(lines)
    assert seen == {"guilty", "innocent", "trains again", "tested under another name"}


def _what_became(lines: list[str]) -> set[str]:
    said = "\n".join(lines)
    seen = {"guilty" if guilty == "True" else "innocent" for guilty in re.findall(VERDICT, said)}
    for machine in re.findall(r"ReturnMachine .*machine=(m\d+)", said):
        _, _, later = said.partition(f"machine={machine} guilty=False")
        if re.search(rf"StartRanks .*machine={machine} ", later):
            seen.add("trains again")
    for machine, host in re.findall(r"MachineJoined machine=(m\d+) .*host=host-(m\d+) ", said):
        if machine != host and re.search(rf"TestMachine .*machine={machine} ", said):
            seen.add("tested under another name")
    return seen


# --- the judges can see --------------------------------------------------------------------------


def first_failure(*harms: Harm) -> str:
    for seed in range(40):
        try:
            run(checked(seed, *harms))
        except RunFailed as problem:
            return str(problem)
    raise AssertionError("nobody noticed")


def test_a_core_that_evicts_at_the_first_strike_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(state: State, *_: object) -> list[Accusation]:
        return [
            Accusation(machine=name, at=strike.at, event=strike.event, why="it was down once")
            for name in state.alerted
            for strike in state.machines[name].strikes[:1]
            if not state.machines[name].evicted
        ]

    monkeypatch.setattr(everstep.core.evicting, "accusations", at_once)
    assert "nobody said anything of it that is enough" in first_failure(Harm.FLAP)


def test_a_core_without_guards_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of_them(state: State, accused: list[Accusation], now: Seconds) -> list[Group]:
        firsts = {each.machine: each for each in reversed(accused)}
        return [Group(machines=(m,), accusation=a, why=a.why) for m, a in firsts.items()]

    monkeypatch.setattr(everstep.core.evicting, "groups_of", all_of_them)
    assert "others within minutes" in first_failure(*CHECKS)


def test_a_core_that_evicts_for_a_warning_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def every_alert(state: State, *_: object) -> list[Accusation]:
        return [
            Accusation(machine=name, at=noted.at, event=noted.event, why="a check says something")
            for name in state.alerted
            for noted in state.machines[name].alerts
            if not state.machines[name].evicted
        ]

    monkeypatch.setattr(everstep.core.evicting, "accusations", every_alert)
    assert "nobody said anything of it that is enough" in first_failure(Harm.ALERT)
