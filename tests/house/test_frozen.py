"""The command line is frozen: a flag that appears, goes or changes is a diff that somebody reads.

`make docs` writes the files anew.
"""

from __future__ import annotations

from everstep.agent.checks.registry import CHECKS
from tests.house.frozen import (
    CHECKS_PAGE,
    FLAGS_PAGE,
    FROZEN_FLAGS,
    LADDER_PAGE,
    checks_page,
    flag_lines,
    ladder_page,
    reference_page,
)

STALE = "run `make docs`, read the difference, and commit it if it is meant"


def test_flags_of_every_command_are_those_that_were_agreed() -> None:
    assert FROZEN_FLAGS.read_text().splitlines() == flag_lines(), STALE


def test_the_page_about_torchruns_flags_is_what_the_table_says() -> None:
    assert FLAGS_PAGE.read_text() == reference_page(), STALE


def test_the_page_about_checks_is_what_the_registry_says() -> None:
    page = CHECKS_PAGE.read_text()
    assert page == checks_page(), STALE
    assert not [name for name in CHECKS if f"| `{name}` |" not in page]


def test_the_page_about_the_ladder_is_what_the_table_says() -> None:
    assert LADDER_PAGE.read_text() == ladder_page(), STALE
