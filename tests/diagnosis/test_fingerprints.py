"""Processes that do the same have one fingerprint, whatever else differs.

dumps/ has what py-spy 0.4 printed of gloo ranks on Linux, without the columns that nobody reads.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import msgspec
import pytest

from everstep.diagnosis.activity import Activity, doing
from everstep.diagnosis.fingerprints import fingerprint_of
from everstep.diagnosis.frames import Dump, Frame, Thread
from everstep.diagnosis.stacks import read

DUMPS = Path(__file__).parent / "dumps"
NAMES = sorted(path.stem for path in DUMPS.glob("*.json"))


def dump(name: str) -> Dump:
    (found,) = read((DUMPS / f"{name}.json").read_text(), f"{name}.json") or []
    return found


def changed(threads: tuple[Thread, ...], chance: random.Random) -> list[Thread]:
    """Another process that does the same: what may differ does."""
    found = [
        msgspec.structs.replace(
            thread,
            active=chance.random() < 0.5,
            frames=tuple(
                Frame(name=moved(frame.name, chance), file=frame.file, line=chance.randrange(9999))
                for frame in thread.frames
            ),
        )
        for thread in threads
    ]
    started = [Frame(name=n, file="threading.py") for n in ("Thread.run", "Thread._bootstrap")]
    found.append(Thread(name="Thread-9", frames=(Frame(name="poll", file="gauge.py"), *started)))
    serves = (Frame(name="Queue._feed", file="multiprocessing/queues.py", line=231), *started)
    found.append(Thread(name="QueueFeederThread", frames=serves))
    chance.shuffle(found)
    return found


def moved(name: str, chance: random.Random) -> str:
    return re.sub("^0x.*", lambda _: f"0x{chance.randrange(1 << 47):012x}", name)


@pytest.mark.parametrize("name", NAMES)
def test_lines_addresses_helpers_and_order_do_not_count(name: str) -> None:
    threads = dump(name).threads
    chance = random.Random(name)
    prints = {fingerprint_of(changed(threads, chance)) for _ in range(20)}
    assert prints == {fingerprint_of(threads)}
    assert re.fullmatch("[0-9a-f]{16}", prints.pop())


@pytest.mark.parametrize(("one", "other"), [("backward0", "backward1"), ("worker0", "worker1")])
def test_two_real_ranks_that_do_the_same(one: str, other: str) -> None:
    """One of the former has a thread that the other has not."""
    assert fingerprint_of(dump(one).threads) == fingerprint_of(dump(other).threads)


def test_what_differs_in_what_it_does_has_another_one() -> None:
    prints = {name: fingerprint_of(dump(name).threads) for name in NAMES}
    assert len(set(prints.values())) == len(prints) - 2
    assert fingerprint_of(dump("worker0").threads, "loader") != prints["worker0"]


def test_equal_prints_mean_equal_activities_also_deep_in_a_stack() -> None:
    """The sign of an evaluation may lie below anything that a signature of few frames has."""
    within = [Frame(name=f"layer_{at}", file="model.py") for at in range(12)]
    wait = Frame(name="all_reduce", file="torch/distributed/distributed_c10d.py")
    ends = [Frame(name=name, file="run.py") for name in ("train", "evaluate")]
    stacks = [(Thread(main=True, frames=(wait, *within, end)),) for end in ends]
    assert fingerprint_of(stacks[0]) != fingerprint_of(stacks[1])


def test_the_way_to_the_script_and_the_depth_of_a_recursion_do_not_count() -> None:
    frames = dump("reduce").main.frames  # type: ignore[union-attr]
    bare = fingerprint_of([Thread(main=True, frames=frames)])
    launched = (*frames, Frame(name="run_path", file="runpy.py"), Frame(name="fork", file="x.py"))
    assert fingerprint_of([Thread(main=True, frames=launched)]) == bare
    twice = (*frames[:4], *frames[2:4], *frames[4:])
    assert fingerprint_of([Thread(main=True, frames=twice)]) == bare


def test_the_import_of_a_module_is_not_the_start_of_the_script() -> None:
    module = (Frame(name="<module>", file="data.py"),)
    imports = (Frame(name="_call_with_frames_removed", file="<frozen importlib._bootstrap>"),)
    ends = [(Frame(name=name, file="run.py"),) for name in ("train", "evaluate")]
    prints = {fingerprint_of([Thread(main=True, frames=(*module, *imports, *end))]) for end in ends}
    assert len(prints) == 2


def test_a_thread_of_the_program_is_no_part_of_the_step_with_frames_below_python_either() -> None:
    """Native dumps show what the kernel started below Python's own start of a thread."""
    wait = Frame(name="all_reduce", file="torch/distributed/distributed_c10d.py")
    below = (Frame(name="Thread._bootstrap", file="threading.py"), Frame(name="0x7f0012345678"))
    main = Thread(main=True, frames=(Frame(name="backward", file="torch/_tensor.py"),))
    one = Dump(place=dump("reduce").place, threads=(main, Thread(frames=(wait, *below))))
    assert doing(one).activity is Activity.BACKWARD
    assert fingerprint_of(one.threads) == fingerprint_of([main])
