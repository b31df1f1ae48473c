"""`everstep checkpoint`: what is on disk is listed and checked, by job or by directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from everstep.checkpoint import disk
from everstep.checkpoint.slots import ShardWriter, Writer
from everstep.cli import main
from everstep.model import Generation, Rank, Step
from tests.checkpoint.plain import digest
from tests.commands.fake_controller import job_in

RANKS = 2


class Done(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


class Command:
    """Calls `everstep checkpoint` in this process."""

    def __init__(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, state: Path
    ) -> None:
        self._capsys = capsys
        self._patch = monkeypatch
        monkeypatch.setenv("EVERSTEP_HOME", str(state))

    def __call__(self, *words: str | Path) -> Done:
        self._patch.setattr(sys, "argv", ["everstep", "checkpoint", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert isinstance(code, int)
        return Done(code, *self._capsys.readouterr())


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    return Command(capsys, monkeypatch, tmp_path / "jobs")


def publish(directory: Path, shm: Path, step: int) -> None:
    """A step of plain bytes that nobody could load."""
    for rank in range(RANKS):
        who = Writer(rank=Rank(rank), world_size=RANKS, generation=Generation(1))
        shards = ShardWriter(shm, who)
        slot = shards.begin(Step(step), 5000)
        slot.payload[:] = bytes([step + rank]) * 5000
        shards.commit(slot, digest(bytes(slot.payload)))
        disk.persist(shm, Rank(rank), Step(step), directory)
    disk.publish(directory, Step(step), Generation(1), RANKS, keep=2)


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A checkpoint directory with two steps."""
    for step in (40, 50):
        publish(tmp_path / "steps", tmp_path / "shm", step)
    return tmp_path / "steps"


def flip(directory: Path, step: int, rank: int) -> None:
    path = disk.shard_path(directory, Step(step), Rank(rank))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_published_steps_are_listed(command: Command, steps: Path) -> None:
    done = command("list", "--from", steps)
    assert done.code == 0
    rows = [line.split() for line in done.out.splitlines()]
    assert [row[:3] for row in rows[1:3]] == [["40", "1", "2"], ["50", "1", "2"]]
    found: list[dict[str, Any]] = json.loads(command("list", "--from", steps, "--json").out)
    assert [item["step"] for item in found] == [40, 50]
    assert found[0]["stored_bytes"] == RANKS * 5000


def test_a_job_is_asked_for_its_own_directory(
    command: Command, steps: Path, tmp_path: Path
) -> None:
    job = job_in(tmp_path / "jobs")
    spec = json.loads(job.spec.read_bytes())
    spec["checkpoint"]["directory"] = str(steps)
    job.spec.write_bytes(msgspec.json.encode(spec))
    for words in (("list",), ("list", job.root.name)):
        assert f"in {steps}" in command(*words).out


def test_verifying_finds_the_one_flipped_bit(command: Command, steps: Path) -> None:
    assert command("verify", "--from", steps) == (
        0,
        "step 40: 2 shards are whole\nstep 50: 2 shards are whole\n",
        "",
    )
    flip(steps, 50, 1)
    done = command("verify", "--from", steps)
    assert done.code == 1
    whole, bad = done.out.splitlines()
    assert whole == "step 40: 2 shards are whole"
    assert f"{steps}/step-50/rank-1.shard is damaged" in bad
    assert command("verify", "--from", steps, "--step", "40").code == 0
    assert command("verify", "--from", steps, "--step", "newest").code == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("verify --step 41", "step 41 is not published in"),
        ("export 41 out", "published are: 40, 50"),
        ("export last out", "'last' is no step: give a number, or newest"),
        ("list some-job", "not both"),
    ],
)
def test_a_wrong_step_or_place_is_one_sentence(
    command: Command, steps: Path, words: str, sentence: str
) -> None:
    done = command(*words.split(), "--from", steps)
    assert (done.code, done.out) == (2, "")
    assert sentence in done.err


def test_no_step_is_no_error_to_list_but_one_to_verify(command: Command, tmp_path: Path) -> None:
    assert command("list", "--from", tmp_path).code == 0
    done = command("verify", "--from", tmp_path)
    assert done.code == 2
    assert "there is no published step" in done.err
