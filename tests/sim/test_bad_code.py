"""Worlds in which people send code, some of it bad: what is rolled back, and that it is judged."""

from __future__ import annotations

import msgspec
import pytest

from everstep.actions import Outcome
from everstep.core.updates import Target
from everstep.model import CodeSpec, VersionId
from everstep.sim.code import Flaw
from everstep.sim.options import Harm, Options
from everstep.sim.run import RunFailed, run
from tests.sim.test_seeds import mild

FIRST = VersionId("a" * 64)


def updated(seed: int, *flaws: Flaw) -> Options:
    """A longer job with standbys, to which code is sent now and then."""
    options = mild(seed, Harm.UPDATE)
    spec = msgspec.structs.replace(
        options.spec,
        code=CodeSpec(version=FIRST, roots=("/code",)),
        policy=msgspec.structs.replace(options.spec.policy, ran_well_steps=10, recoveries_max=5),
    )
    return msgspec.structs.replace(
        options,
        spec=spec,
        flaws=flaws,
        crash_after=5.0,
        steps=300,
        step_s=0.5,
        slow=0.0,
        harm_every_s=40.0,
        safety_s=120.0,
    )


def told(*flaws: Flaw) -> str:
    lines: list[str] = []
    for seed in range(8):
        report = run(updated(seed, *flaws), lines.append)
        assert report.outcome is Outcome.FINISHED, report
        assert report.evictions == 0, report
    return "\n".join(lines)


@pytest.mark.parametrize("flaw", [Flaw.RAISES, Flaw.CRASHES, Flaw.NAN])
def test_bad_code_is_rolled_back_by_itself_and_costs_no_machine(flaw: Flaw) -> None:
    said = told(flaw)
    assert "rung=rollback" in said
    assert "rolled_back=True" in said


def test_code_that_does_not_import_never_runs() -> None:
    said = told(Flaw.NO_IMPORT)
    assert "RefuseUpdate" in said
    assert "ModuleNotFoundError'" not in said, "no rank said so"


def first_failure(*flaws: Flaw) -> str:
    for seed in range(20):
        try:
            run(updated(seed, *flaws))
        except RunFailed as problem:
            return str(problem)
    raise AssertionError("nobody noticed")


def test_a_core_that_goes_back_to_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> Target:
        return Target(version=None, why="nothing is good enough")

    monkeypatch.setattr("everstep.core.ladder.rollback_target", nothing)
    assert "the job failed: the same error twice" in first_failure(Flaw.RAISES)


def test_a_core_that_starts_code_where_it_is_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.core.spreading.lacks_code", lambda state: False)
    monkeypatch.setattr("everstep.core.updates.everybody_has", lambda *_: True)
    monkeypatch.setattr("everstep.core.trials.everybody_has", lambda *_: True)
    assert "which does not h" in first_failure().replace(
        "which does not have it", "which does not h"
    )
