"""What checkpoints take, in numbers and in words."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from everstep.checkpoint.need import Need, in_words, segment_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "0.977 KiB"),
        (1536, "1.5 KiB"),
        (5 << 20, "5 MiB"),
        (int(23.5 * GIB), "23.5 GiB"),
        (1 << 60, "1048576 TiB"),
    ],
)
def test_sizes_are_said_in_the_unit_that_fits(size: int, words: str) -> None:
    assert in_words(size) == words


def test_the_need_counts_what_rotates_what_is_kept_and_what_lies_here_for_others() -> None:
    alone = Need(payload_bytes=GIB, backup_bytes=GIB, local_ranks=2, backups=False)
    assert alone.total_bytes == 2 * 4 * segment_bytes(GIB)
    backed = Need(payload_bytes=GIB, backup_bytes=GIB // 4, local_ranks=2, backups=True)
    assert backed.total_bytes == 2 * ((3 + 2) * segment_bytes(GIB) + 2 * segment_bytes(GIB // 4))
    assert str(backed) == (
        "11 GiB (for each of 2 ranks on this machine 5 slots x 1 GiB: 3 that rotate, 2 on their "
        "way to a peer; and 2 x 256 MiB for a peer's)"
    )


def test_the_advice_names_the_option_that_saves_most() -> None:
    need = Need(payload_bytes=1, backup_bytes=1, local_ranks=1, backups=True)
    assert "--no-backup" in need.advice
    assert "--no-backup" not in replace(need, backups=False).advice


@pytest.mark.parametrize("backups", [True, False])
def test_a_limit_on_locked_memory_is_named_if_a_rank_has_more_slots_than_it_allows(
    *, backups: bool
) -> None:
    need = Need(payload_bytes=GIB, backup_bytes=GIB, local_ranks=8, backups=backups)
    own = (5 if backups else 4) * segment_bytes(GIB)
    assert need.unpinned(None) == ""
    assert need.unpinned(own) == ""
    said = need.unpinned(8 << 20)
    assert f"pins {in_words(own)} of it" in said
    assert "may lock 8 MiB" in said
    assert "ulimit -l" in said
    assert need.unpinned(own - 1) != ""
