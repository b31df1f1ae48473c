"""The list of all checks and sources: what belongs together is together."""

from __future__ import annotations

import pytest

from everstep.agent.checks.registry import CHECKS, SOURCES, make_checks, make_source

AN_HOUR = 3600.0


def test_every_check_has_its_source_and_every_source_a_check() -> None:
    assert {check.source for check in CHECKS.values()} == set(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_silence_is_told_in_the_name_of_a_check_of_that_source(name: str) -> None:
    """Else a site could neither turn it off nor weaken it, and it would never be told again."""
    said = make_source(name).unanswered(AN_HOUR, 1000)
    if said is not None:
        assert CHECKS[said.check].source == name
        (weak,) = [
            c for c in make_checks({said.check: {"at_most": "warn"}}) if c.name == said.check
        ]
        assert weak.limits.at_most == "warn"


def test_which_sources_have_something_to_say_of_a_silent_child() -> None:
    silent = {name for name in SOURCES if make_source(name).unanswered(AN_HOUR, 1000)}
    assert silent == {"nvml", "nvml-events", "net", "infiniband", "mounts"}
