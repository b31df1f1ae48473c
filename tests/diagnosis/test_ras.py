"""NCCL's RAS prints one thing in several forms, and none of them is a verdict."""

from __future__ import annotations

from everstep.diagnosis.findings import Site
from everstep.diagnosis.ras import Ras, read

HEAD = """\
NCCL version 2.28.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  {status}

Errors
======

{errors}
Warnings
========

{warnings}
"""


def _answers(*texts: str) -> Ras:
    ras = Ras()
    assert ras.take("ras.txt", "\n".join(texts).encode())
    return ras


def _ras(status: str = "OK", errors: str = "", warnings: str = "") -> str:
    return HEAD.format(status=status, errors=errors, warnings=warnings)


def _late(most: int, least: int) -> str:
    text = (
        "#0-0 (78db921d1c117b4a) MISMATCH\n"
        "  Communicator ranks have different AllReduce operation counts\n"
        f"  7 ranks have launched up to operation {most}\n"
        f"  Rank 7 has launched up to operation {least} -- GPU 3 managed by process 1650386 on"
        " node node1\n"
    )
    return _ras("MISMATCH", warnings=text)


def test_one_answer_with_one_operation_between_ranks_is_what_a_working_job_shows() -> None:
    (found,) = _answers(_late(64, 63)).findings(Site(world_size=8))
    assert (found.rule, found.accused_ranks) == ("ras.split", ())
    assert "second query" in found.undecided


def test_two_equal_answers_are_a_hang_and_name_the_late_rank() -> None:
    (found,) = _answers(_late(64, 63), _late(64, 63)).findings(Site(world_size=8))
    assert (found.rule, found.accused_ranks) == ("ras.behind", (7,))


def test_ranks_of_a_smaller_communicator_are_no_ranks_of_the_job() -> None:
    (found,) = _answers(_late(64, 60), _late(64, 60)).findings(Site(world_size=64))
    assert found.accused_ranks == ()


def test_a_job_whose_counts_go_on_works() -> None:
    (found,) = _answers(_late(64, 60), _late(128, 127)).findings(Site(world_size=8))
    assert (found.category, found.action) == ("none", "none")


def test_a_missing_rank_is_named_in_two_forms() -> None:
    process = "INCOMPLETE\n  Missing communicator data from 1 job process\n"
    process += (
        "  Process 3748990 on node node1 managing GPU 3\n\n#0-0 (78db921d1c117b4a) INCOMPLETE\n"
    )
    process += "  Missing communicator data from 1 rank\n"
    for line in (
        "  The missing rank: 7\n",
        "  Rank 7 -- GPU 3 managed by process 3748990 on node node1\n",
    ):
        answer = _answers(_ras("INCOMPLETE", errors=process + line))
        (found,) = answer.findings(Site(world_size=8))
        assert (found.rule, found.accused_ranks) == ("ras.silent", (7,))


def test_different_states_name_nobody() -> None:
    states = "#0-1 (27a079b828ff1a75) MISMATCH\n  Communicator ranks have different status\n"
    states += "  6 ranks have status RUNNING\n  2 ranks have status ABORT\n"
    states += "  Rank 0 -- GPU 0 managed by process 48 on node node0\n"
    states += "  Rank 1 -- GPU 1 managed by process 49 on node node0\n"
    (found,) = _answers(_ras("MISMATCH", warnings=states)).findings(Site(world_size=8))
    assert (found.rule, found.accused_ranks) == ("ras.states", ())


def test_a_log_of_nccl_is_no_answer() -> None:
    log = "node-25:77040:77040 [0] NCCL INFO NCCL version 2.27.3+cuda12.9\n"
    assert read(log, "train.log") is None
    assert read("NCCL version 2.27.3 compiled with CUDA 12.9\nstep 1\n", "train.log") is None
