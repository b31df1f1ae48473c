"""What a look costs: texts are sent for as far as they fit, those that most ranks show first."""

from __future__ import annotations

import pytest

from everstep.core import looking
from tests.core.shown import shown
from tests.transcripts.transcript import Transcript

ASKED = """\
> 0 job stalls nnodes=4 nproc=2 standbys=0
> 1 join m0 m1 m2 m3
> 2 stopped m0 m1 m2 m3
> 3 started m0 m1 m2 m3
> 4 progress 0
> 20 progress 30
> 21 StacksRequested by=ada
"""


def test_of_more_stacks_than_fit_the_text_of_those_that_most_ranks_show_is_sent_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(looking, "TEXTS_MAX", 2)  # one of them stands for no stack
    job = Transcript()
    job.run(ASKED)
    told = job.run("> 22 looked m0 m1 m2 m3 lock=0,7 barrier=1-6\n")
    assert shown("barrier", "S").stack in told
    assert shown("lock", "S").stack not in told
