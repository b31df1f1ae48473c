"""Runs one world: faults first, then calm, and then the job must end well within a bound.

Safety is judged at every step of the run (truth.py), liveness here.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.actions import FinishJob, Outcome
from everstep.core.ettr import Owner, spent
from everstep.core.must import InvariantBroken, must
from everstep.model import Seconds, Value
from everstep.sim.blame import longest_hang_s
from everstep.sim.code import Flaw
from everstep.sim.ground import BEGINS_AT
from everstep.sim.nemesis import Nemesis
from everstep.sim.options import MANY, SLOWNESS, Harm, Options, Script
from everstep.sim.world import World


class Report(Value, frozen=True, kw_only=True):
    """What a run was like."""

    seed: int
    outcome: str
    virtual_s: Seconds
    trained_s: Seconds
    """Time that the job's steps really took, each counted once."""
    account: dict[Owner, Seconds]
    """Who owns the job's time, as the controller says."""
    records: int
    generations: int
    evictions: int
    terms: int
    calls: int
    hash: str
    """Of everything that was journalled: equal for equal seeds, or something is not determined."""


class RunFailed(InvariantBroken):
    """A run that broke a promise; the message says how to see it again."""


def run(options: Options, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Run it; `tell` hears every record and every fault. Raises RunFailed.

    What run(draw(seed)) reports depends on the seed alone, in any process on any machine.
    """
    world = World(options, tell)
    nemesis = Nemesis(world)
    try:
        _live(world, options)
        _judge(world, nemesis)
    except (InvariantBroken, AssertionError) as problem:
        raise RunFailed(
            f"seed {options.seed}, at {world.ground.schedule.now - BEGINS_AT:.3f} s: {problem}\n"
            f"again: python -m everstep.sim --seed {options.seed}"
        ) from problem
    return _report(world)


def _live(world: World, options: Options) -> None:
    schedule = world.ground.schedule
    schedule.run(lambda: world.over, BEGINS_AT + options.safety_s)
    if not world.over:
        world.heal()
        bound_s = _bound_s(options)
        ended = schedule.run(lambda: world.over, schedule.now + bound_s)
        must(ended, f"the job did not end within {bound_s:.0f} s after the last fault")


def _bound_s(options: Options) -> Seconds:
    """Generous: everything once more, and every patience of the policies several times."""
    policy = options.spec.policy
    patience_s = (
        policy.agent_return_s
        + policy.silent_s
        + policy.gone_within_s
        + policy.start_within_s
        + policy.gather_s
        + policy.settle_s
        + policy.end_within_s
        + policy.stop_grace_s
    )
    slowness = SLOWNESS if options.slow else 1.0
    training_s = options.steps * options.step_s * (1 + options.jitter) * slowness
    training_s += sum(
        p.takes_s * (1 + options.steps // p.every if p.every else 1) for p in options.pauses
    )
    return 60.0 + 4 * patience_s * slowness + 3 * training_s + _hangs_s(options)


def _hangs_s(options: Options) -> Seconds:
    """Those under way, and those of a version that hangs again until somebody mends it."""
    harms, policy = options.harms, options.spec.policy
    held = not {Harm.HANG, Harm.SICKEN}.isdisjoint(harms)
    updated = not {Harm.UPDATE, Harm.UPDATE_TWICE}.isdisjoint(harms)
    strays = updated and Flaw.STRAYS in options.flaws
    times = (2 if held else 0) + (policy.rollbacks_max + 3 if strays else 0)
    return times * longest_hang_s(policy)


def _judge(world: World, nemesis: Nemesis) -> None:
    """Did it end as it should?"""
    truth = world.ground.truth
    truth.over()
    finish = truth.watch.finish
    assert finish is not None
    script = world.ground.options.script
    if finish.outcome is Outcome.STOPPED:
        must(nemesis.asked_to_stop, "the job was stopped and nobody had asked for it")
    elif finish.outcome is Outcome.FAILED:
        must(_may_fail(world, finish), f"the job failed: {finish.why}")
    else:
        good = script in (Script.TRAINS, Script.UNATTACHED) or _alone(world)
        must(good, f"the job finished, although its script {script}")


def _alone(world: World) -> bool:
    """Who quits early leaves nobody behind."""
    return world.controller.state.job.world_size == 1


def _may_fail(world: World, finish: FinishJob) -> bool:
    """Where the script is to blame; and where faults came with no progress in between."""
    options, why = world.ground.options, finish.why
    if world.ground.truth.code_may_end_it(world.ground.codes):
        return True
    if "before its first step" in why:
        return options.script is Script.RAISES
    if "no older step is kept" in why:
        return world.ground.truth.knows_of_nan
    if "in two generations in a row" in why:
        return True  # faults at the very end of a job can look like this
    return "brought no new step" in why and options.spec.policy.recoveries_max < MANY


def _report(world: World) -> Report:
    watch, ground = world.ground.truth.watch, world.ground
    assert watch.finish is not None
    return Report(
        seed=ground.options.seed,
        outcome=watch.finish.outcome,
        virtual_s=ground.schedule.now - BEGINS_AT,
        trained_s=ground.truth.trained_s,
        account=spent(world.controller.state.account, ground.schedule.now),
        records=watch.seq,
        generations=watch.generation,
        evictions=len(world.controller.state.evictions),
        terms=ground.ledger.term,
        calls=ground.schedule.done,
        hash=ground.ledger.hash.hexdigest(),
    )
