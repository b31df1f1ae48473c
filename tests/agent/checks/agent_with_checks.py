"""`python -m tests.agent.checks.agent_with_checks MACHINE_JSON`: an agent with a test's checks.

They look at $TEST_ROOT instead of this machine, and often.
"""

from __future__ import annotations

import os

import msgspec

from everstep.agent import __main__ as agent
from everstep.agent.checks import registry, runner
from everstep.agent.checks.check import Here
from everstep.agent.checks.surroundings import Surroundings
from tests.agent.checks.parts import Mood, Moody, PidCheck, WordsCheck, WordsSource


class Quick(WordsCheck):
    """Is over soon."""

    clear_after_s = 0.2


def main() -> None:
    for known in (registry.CHECKS, registry.SOURCES):
        known.clear()
    registry.CHECKS.update({check.name: check for check in (Quick, PidCheck, Mood)})
    registry.SOURCES.update({source.name: source for source in (WordsSource, Moody)})
    runner.SPREAD_S = 0.01
    runner.ABSENT_AGAIN_S = runner.REMEMBER_EVERY_S = 0.05
    now = Surroundings.now

    def elsewhere(surroundings: Surroundings) -> Here:
        return msgspec.structs.replace(now(surroundings), root=os.environ["TEST_ROOT"])

    Surroundings.now = elsewhere  # type: ignore[method-assign, assignment]
    agent.main()


if __name__ == "__main__":
    main()
