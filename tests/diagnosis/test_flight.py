"""Flight records are untrusted input, and numbers of different sources are never compared."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from everstep.diagnosis import report
from everstep.diagnosis.dumps import Dumps
from everstep.diagnosis.findings import Site
from everstep.diagnosis.flight import Flight, read
from everstep.diagnosis.hangs import finding_of
from everstep.diagnosis.standing import Call, Peer, Shape, Standing, Standstill, standstill
from everstep.model import Rank


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.target,)


def test_a_record_cannot_run_code(tmp_path: Path) -> None:
    target = tmp_path / "made"
    assert read(pickle.dumps({"entries": [Bomb(target)], "version": "2.10"}), "rank_0") is None
    assert not target.exists()


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80", b"\x80\x04.", b"{", b"[1, 2]", b'{"entries": 3}', b"plain text", b"\xff\xfe"],
)
def test_what_is_no_record_is_declined(data: bytes) -> None:
    assert read(data, "rank_0") is None


def _entry(seq: int, **fields: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "collective_seq_id": seq,
        "process_group": ["0", "default_pg"],
        "pg_id": 0,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "retired": False,
    }
    return entry | fields


def test_the_rank_is_in_the_document_else_in_the_name() -> None:
    dump = {"version": "2.4", "entries": [_entry(1)]}
    assert [r.rank for r in read(json.dumps(dump).encode(), "nccl_trace_rank_gpu-07_40") or []] == [
        40
    ]
    both = json.dumps({"3": dump, "rank 5": dump}).encode()
    assert [record.rank for record in read(both, "all.json") or []] == [3, 5]


def test_the_status_counts_where_the_buffer_was_overrun() -> None:
    status = {"0": {"last_enqueued_collective": 214, "last_completed_collective": 96}}
    dump = {"version": "2.10", "pg_status": status, "entries": [_entry(213), _entry(214)]}
    (record,) = read(json.dumps(dump).encode(), "rank-0.json") or []
    assert record.standings[0].waits_at == 97


def test_a_status_of_an_unknown_number_is_of_no_group() -> None:
    """pg_id counts on each rank for itself; the name of a group is another number."""
    status = {"3": {"last_enqueued_collective": 9, "last_completed_collective": 2}}
    dump = {"version": "2.10", "pg_status": status, "entries": [_entry(1, retired=True)]}
    (record,) = read(json.dumps(dump).encode(), "rank-0.json") or []
    assert [standing.group for standing in record.standings] == ["0"]


def _stand(rank: int, enqueued: int, completed: int, **fields: Any) -> Standing:
    fields = {"group": "0", "calls": {}} | fields
    return Standing(rank=Rank(rank), enqueued=enqueued, completed=completed, **fields)


def test_two_ranks_are_no_majority() -> None:
    found = standstill([_stand(0, 5, 4), _stand(1, 4, 4)])
    assert found.shape is Shape.AHEAD


def test_shapes_may_differ_where_elements_are_as_many() -> None:
    calls = [Call(op="all_reduce", numel_in=4), Call(op="all_reduce", numel_in=4)]
    found = standstill([_stand(r, 5, 4, calls={5: call}) for r, call in enumerate(calls)])
    assert found.shape is Shape.JOINED


def test_a_difference_before_the_standstill_is_history() -> None:
    """What all finished cannot be what they hang in."""
    first = {1: Call(op="broadcast"), 5: Call(op="all_reduce")}
    second = {1: Call(op="reduce"), 5: Call(op="all_reduce")}
    found = standstill([_stand(0, 5, 4, calls=first), _stand(1, 5, 4, calls=second)])
    assert found.shape is Shape.JOINED


def test_groups_of_one_name_with_other_members_are_two_groups() -> None:
    def half(members: tuple[int, ...], call: Call) -> list[Standing]:
        ranks = tuple(Rank(m) for m in members)
        return [_stand(m, 5, 4, members=ranks, calls={5: call}) for m in members]

    found = standstill([*half((0, 1), Call(op="reduce")), *half((2, 3), Call(op="all_reduce"))])
    assert found.shape is Shape.JOINED


def test_a_receive_waits_for_a_sender_that_has_nothing_pending() -> None:
    standings = [_stand(rank, 4, 4) for rank in range(4)]
    peers = [
        Peer(rank=Rank(0), peer=Rank(3), sends=False),
        Peer(rank=Rank(3), peer=Rank(2), sends=False),
    ]
    found = standstill(standings, peers)
    assert (found.shape, found.ranks) == (Shape.LATE, (2,))


def _chain(*peers: tuple[int, int, bool]) -> Standstill:
    """Ranks 0 and 1 wait in a collective for 2 and 3, which wait for others."""
    standings = [_stand(rank, 5, 4) for rank in (0, 1)] + [_stand(rank, 4, 4) for rank in (2, 3)]
    waits = [Peer(rank=Rank(a), peer=Rank(b), sends=sends) for a, b, sends in peers]
    return standstill(standings, waits)


def test_a_send_and_the_receive_that_fits_it_are_no_circle() -> None:
    found = _chain((2, 3, True), (3, 2, False))
    assert (found.shape, found.ranks) == (Shape.PAIR, (2, 3))
    assert finding_of("flight", found, Site(), None, 0).why == (
        "ranks 2, 3 have a send and the receive that fits it pending, and the others wait for them"
    )


def test_two_sends_to_each_other_and_a_wait_for_one_that_waits_back_are_a_circle() -> None:
    assert _chain((2, 3, True), (3, 2, True)).shape is Shape.CIRCLE
    assert _chain((2, 0, False), (3, 2, False)).shape is Shape.CIRCLE


def test_a_group_that_all_have_joined_is_where_a_chain_of_waits_ends() -> None:
    standings = [
        *(_stand(rank, 5 if rank < 2 else 4, 4) for rank in range(4)),
        *(_stand(rank, 8, 7, group="1", members=(Rank(2), Rank(3))) for rank in (2, 3)),
    ]
    found = standstill(standings)
    assert (found.shape, found.group, found.ranks) == (Shape.JOINED, "1", (2, 3))
    assert found.waiting == (2, 3)


def test_a_report_is_read_under_any_logger() -> None:
    text = (
        "INFO:fr:Not all ranks joining collective: sequence number: 7\nINFO:fr:missing ranks: {2}\n"
        "INFO:fr:expected ranks: {0, 1, 2, 3}\n"
    )
    (block,) = report.read(text, "fr.log") or []
    assert (block.seq, block.missing, len(block.expected)) == (7, (2,), 4)


def test_stacks_say_more_than_records() -> None:
    """Both name rank 1: the stack says why."""
    dumps = Dumps()
    stack = 'Process 9: python t.py\n\nThread 9 (idle): "MainThread"\n    {} (t.py:3)\n'
    wait = "all_reduce (torch/distributed/distributed_c10d.py:9)\n    main"
    for rank in range(4):
        done = rank == 1
        entries = [_entry(4, retired=True)] + ([] if done else [_entry(5)])
        dumps.take(f"rank-{rank}.json", json.dumps({"version": "2", "entries": entries}).encode())
        text = stack.format("take_lock" if done else wait)
        dumps.take(f"rank-{rank}.txt", text.encode())
    first, *others = dumps.findings(Site(world_size=4))
    assert first.rule == "stacks.outlier"
    assert first.accused_ranks == (1,)
    assert [(each.rule, each.role) for each in others] == [("flight.late", "confirm")]
    assert Flight().findings(Site()) == []


def test_records_may_stand_one_on_each_line() -> None:
    lines = [json.dumps({"rank": r, "version": "2.4", "entries": [_entry(1)]}) for r in (0, 1)]
    assert [r.rank for r in read("\n".join(lines).encode(), "all.jsonl") or []] == [0, 1]


@pytest.mark.parametrize("fields", [{"frames": 3}, {"state": {}}, {"input_dtypes": 1.5}])
def test_a_record_with_other_types_than_torch_writes_is_declined(fields: dict[str, Any]) -> None:
    dump = {"version": "2.10", "entries": [_entry(1, **fields)]}
    assert read(json.dumps(dump).encode(), "rank-0.json") is None
