"""The command line is frozen: a flag that appears, goes or changes is a diff that somebody reads.

`make docs` writes both files anew.
"""

from __future__ import annotations

from tests.house.frozen import FLAGS_PAGE, FROZEN_FLAGS, flag_lines, reference_page

STALE = "run `make docs`, read the difference, and commit it if it is meant"


def test_flags_of_every_command_are_those_that_were_agreed() -> None:
    assert FROZEN_FLAGS.read_text().splitlines() == flag_lines(), STALE


def test_the_page_about_torchruns_flags_is_what_the_table_says() -> None:
    assert FLAGS_PAGE.read_text() == reference_page(), STALE
