"""What the tools print is read as they print it, and what makes two stacks alike."""

from __future__ import annotations

from everstep.diagnosis.findings import Site
from everstep.diagnosis.frames import Frame, Thread, plain, signature
from everstep.diagnosis.headings import heading_of, heading_of_name
from everstep.diagnosis.stacks import placed, read
from everstep.diagnosis.trainers import attempts_of

SPY = """\
Process 4410: /opt/venv/bin/python3.11 -u train.py
Python v3.11.9 (/opt/venv/bin/python3.11)

Thread 4410 (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2937)
        Arguments:
            tensor: <Tensor at 0x7f4de5>
    step (train.py:31)
Thread 4470 (idle): "QueueFeederThread"
    Condition.wait (threading.py:327)
    Queue._feed (multiprocessing/queues.py:231)
"""
FATAL = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f3b1c7fe640 (most recent call first):
  File "/srv/train.py", line 31 in step
"""


def test_locals_are_no_frames() -> None:
    (dump,) = read(SPY, "a.txt") or []
    assert dump.main is not None
    assert [frame.name for frame in dump.main.frames] == ["all_reduce", "step"]
    assert dump.pid == 4410


def test_labels_before_every_line_are_taken_off_and_name_the_rank() -> None:
    text = "".join(f"[rank{rank}]: {line}\n" for rank in (3, 4) for line in SPY.splitlines())
    assert [dump.rank for dump in read(text, "job.log") or []] == [3, 4]


def test_the_stack_of_a_crash_is_no_dump() -> None:
    assert read(FATAL, "rank-0.log") is None


def test_a_log_is_no_dump() -> None:
    log = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\nKeyError: 1\n'
    assert read(log, "train.log") is None


def test_a_traceback_after_a_dump_does_not_join_it() -> None:
    text = (
        'Timeout (0:05:00)!\nThread 0x00007f3b1c7fe640 (most recent call first):\n  File "a.py",'
        ' line 3 in wait\nTraceback (most recent call last):\n  File "b.py", line 9, in main\n'
    )
    (dump,) = read(text, "rank-2.log") or []
    assert [frame.name for frame in dump.threads[0].frames] == ["wait"]
    assert dump.rank == 2


def test_a_local_rank_is_no_rank() -> None:
    assert heading_of("=== node-05 local rank 2 pid 4411 ===").rank is None
    assert heading_of("=== node-05 local rank 2 pid 4411 ===").local_rank == 2
    assert heading_of("### rank 3 on node-10").machine == "node-10"
    assert heading_of_name("dumps-rank0-team/stack.txt").rank is None
    assert heading_of_name("attempt-2/rank_17.json").rank == 17
    assert heading_of_name("attempt-2.stacks.txt").machine is None


def test_names_are_compared_without_class_and_template() -> None:
    assert plain("Condition.wait") == "wait"
    assert plain("_exception_logger.<locals>.wrapper") == "wrapper"
    assert (
        plain("std::vector<int, std::allocator<int> >::push_back(int&&)")
        == "std::vector::push_back"
    )


def test_signatures_know_no_addresses_lines_or_serving_threads() -> None:
    def main(line: int) -> Thread:
        frames = ("all_reduce", "step", "main")
        return Thread(
            main=True, frames=tuple(Frame(name=n, file="t.py", line=line) for n in frames)
        )

    feeder = Thread(frames=(Frame(name="Condition.wait"), Frame(name="Queue._feed")))
    native = Thread(frames=(Frame(name="0x7f10aa"), *main(5).frames))
    assert signature([main(3)]) == signature([feeder, main(4)]) == signature([native])
    assert signature([main(3)], "trainer") != signature([main(3)], "loader")


def test_a_rank_under_another_pid_is_another_attempt() -> None:
    text = "### rank 0 on node-1\n" + SPY
    dumps = [*(read(text, "a.txt") or []), *(read(text.replace("4410", "99"), "b.txt") or [])]
    assert [len(run) for run in attempts_of(dumps)] == [1, 1]
    assert [len(run) for run in attempts_of(dumps[:1] * 2)] == [2]


def test_a_local_rank_is_a_rank_where_the_site_says_which() -> None:
    dumps = read("### local rank 2 on node-2\n" + SPY, "a.txt") or []
    site = Site(world_size=8, ranks_per_machine=4, hosts=("node-1", "node-2"))
    assert [dump.rank for dump in placed(dumps, site)] == [6]
    assert [dump.rank for dump in placed(dumps, Site())] == [None]


def test_main_threads_in_a_row_share_the_stack_below_them() -> None:
    text = (
        'Thread 11 (active): "MainThread"\nThread 12 (active): "MainThread"\n    wait (a.py:1)\n'
        'Thread 13 (idle): "MainThread"\n    get (b.py:2)\n'
    )
    dumps = read(text, "notes.txt") or []
    assert [(dump.pid, dump.threads[0].frames[0].name) for dump in dumps] == [
        (11, "wait"),
        (12, "wait"),
        (13, "get"),
    ]


def test_a_count_above_a_stack_stands_for_as_many_processes() -> None:
    text = '6 processes are in:\n\nThread 11 (active): "MainThread"\n    wait (a.py:1)\n'
    assert len(read(text, "notes.txt") or []) == 6


def test_a_log_that_begins_with_json_may_have_a_dump_in_it() -> None:
    text = '{"step": 1}\nTimeout (0:05:00)!\nThread 0x00007f3b1c7fe640 (most recent call first):\n'
    dumps = read(text + '  File "a.py", line 3 in wait\n', "rank-2.log") or []
    assert [dump.rank for dump in dumps] == [2]
