"""What a line of a waiting rank proves, and what it does not."""

from __future__ import annotations

import pytest

from everstep.diagnosis.busy import Busy, busy_of
from everstep.diagnosis.findings import Place, Site, Speaker
from everstep.diagnosis.ledger import MARKS, Kind, parse
from everstep.diagnosis.silence import Ledger
from everstep.model import Rank

HERE = Place(file="train.log", line=1, text="")
OLD = (
    "[E ProcessGroupNCCL.cpp:474] [Rank 1] Watchdog caught collective operation timeout:"
    " WorkNCCL(SeqNum=15, OpType=BROADCAST, Timeout(ms)=1800000) ran for 1800317 milliseconds"
    " before timing out."
)
STATUS = (
    "[rank4]:[E1206 18:44:12.755468433 ProcessGroupNCCL.cpp:1664] [PG 1 Rank 4] Exception (either"
    " an error or timeout) detected by watchdog at work: 7753, last enqueued NCCL work: 7755, last"
    " completed NCCL work: 7752."
)


def test_old_and_new_wordings_of_the_watchdog() -> None:
    entry = parse(OLD, HERE)
    assert entry is not None
    assert (entry.kind, entry.rank, entry.seq, entry.op) == (Kind.TIMED_OUT, 1, 15, "BROADCAST")
    entry = parse(STATUS, HERE)
    assert entry is not None
    assert (entry.kind, entry.rank, entry.group) == (Kind.STATUS, 4, "1")
    assert (entry.seq, entry.enqueued, entry.completed) == (7753, 7755, 7752)


def test_a_rank_in_brackets_of_another_group_is_none_of_the_job() -> None:
    inner = STATUS.replace("[rank4]:", "")
    entry = parse(inner, HERE)
    assert entry is not None
    assert entry.rank is None
    entry = parse(inner, HERE, Speaker(rank=Rank(12)))
    assert entry is not None
    assert entry.rank == 12


@pytest.mark.parametrize("line", [OLD, STATUS])
def test_every_line_has_a_mark(line: str) -> None:
    assert any(mark in line for mark in MARKS)


def test_ordinary_lines_are_no_entries() -> None:
    assert parse("step 10 loss 2.1", HERE) is None
    assert parse("[rank3]: step 10 loss 2.1", HERE) is None


def _ledger(*lines: str) -> Ledger:
    ledger = Ledger()
    for line in lines:
        ledger.line(line, HERE)
    return ledger


def test_a_victim_of_another_kind_is_not_silent() -> None:
    """Rank 2 only saw a closed connection: it was there, so rank 3 is the one that says nothing."""
    lines = [OLD.replace("Rank 1", f"Rank {rank}") for rank in (0, 1)]
    lines.append(
        "[rank2]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    )
    (found,) = _ledger(*lines).findings(Site(world_size=4))
    assert found.accused_ranks == (3,)


def test_repeated_lines_are_counted_and_their_ranks_unknown() -> None:
    line = OLD.replace("before timing out.", "before timing out. [repeated 62x across cluster]")
    (found,) = _ledger(line).findings(Site(world_size=64))
    assert found.accused_ranks == ()
    assert "63 of 64" in found.why


def test_two_ranks_accuse_nobody() -> None:
    (found,) = _ledger(OLD).findings(Site(world_size=2))
    assert found.accused_ranks == ()


def test_without_a_world_size_nobody_is_silent() -> None:
    (found,) = _ledger(OLD).findings(Site())
    assert found.accused_ranks == ()


def test_a_named_rank_that_speaks_itself_was_there() -> None:
    barrier = "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 6000 ms"
    (found,) = _ledger(barrier, OLD).findings(Site(world_size=16))
    assert found.accused_ranks == (2,)


def test_the_last_attempt_is_judged() -> None:
    ledger = Ledger()
    ledger.line(OLD, HERE, attempt=0)
    ledger.line(OLD.replace("SeqNum=15", "SeqNum=900"), HERE, attempt=1)
    (found,) = ledger.findings(Site())
    assert "900" in found.why
    assert found.attempt == 1


def test_last_words_tell_what_was_being_done() -> None:
    assert busy_of(["step 3", "saving sharded state to /mnt/a"]) is Busy.SAVING
    assert busy_of(["[rank0]: evaluating 10/400"]) is Busy.EVALUATING
    assert busy_of(["packed 546/900"]) is Busy.PREPARING
    assert busy_of(["step 3 loss 2.1", "Error: while saving"]) is None


def test_steps_since_a_save_say_that_it_ended() -> None:
    saved = "saved checkpoint at step 5200"
    assert busy_of([saved, "step 5201 loss 2.1", "step 5202 loss 2.0"]) is None
    assert busy_of(["step 5202 loss 2.0", saved]) is Busy.SAVING


def test_lines_at_the_start_do_not_count_as_waiting() -> None:
    """What a job did before an early warning of NCCL says nothing of a hang much later."""
    assert not Ledger().line("[rank0]: NCCL WARN MSCCL++: cannot load plugin", HERE)
