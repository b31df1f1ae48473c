"""`everstep stacks`: of a job that runs, of the last look, and of dumps of any job."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from everstep.cli import main
from everstep.commands import stacks
from everstep.controller.look_views import ClusterView, LookView, StacksView, UnderWay
from everstep.controller.looks import LookAsked
from everstep.diagnosis.frames import Frame, Thread
from everstep.looks import Fingerprint, LookResult, Purpose, Stack
from everstep.model import JobId
from tests.commands.fake_controller import FakeController, Refusal, job_in
from tests.diagnosis.casebook import CASES

PIPELINE = CASES / "211-one-pipeline-stuck"
LOADER = CASES / "204-loader-worker-blocks-on-rank-1"
NFS = CASES / "213-read-from-nfs-in-state-d"
LATE = CASES / "240-gloo-pickles-one-late"
COUNTS = CASES / "233-counts-instead-of-stacks"
MOST, ODD = Fingerprint("a" * 16), Fingerprint("b" * 16)


class Done(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(stacks, "POLL_S", 0.005)

    def call(*words: str | Path, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "argv", ["everstep", "stacks", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return call


# --- dumps ---------------------------------------------------------------------------------------


def test_who_differs_is_shown_with_its_frames_and_its_children(command: Command) -> None:
    done = command(LOADER)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == "8 stack dumps in 4 files"
    assert lines[2].split()[:3] == ["3", "0,", "2-3"]
    at = lines.index("    train (job.py:73)")
    assert lines[at + 1] == "    ... 1 frame in common"
    assert (
        lines[at + 2] == "  1 loader worker in its data loader (fetch), at fetch_block (job.py:38)"
    )
    assert "    train (job.py:75)" not in lines, "that is what most are in"
    assert lines[-2].startswith("verdict: rank 1 is in its data loader")
    assert lines[-1] == "named: rank 1"


def test_all_threads_and_whole_stacks_are_shown_on_request(command: Command) -> None:
    short, whole = command(LOADER), command(LOADER, "--full", "--all-threads")
    assert "    train (job.py:75)" in whole.out.splitlines()
    assert "in common" not in whole.out
    assert "  MainThread" in whole.out.splitlines()
    assert len(whole.out.splitlines()) > len(short.out.splitlines())


def test_the_state_of_the_kernel_is_shown_with_what_it_means(command: Command) -> None:
    out = command(NFS).out
    assert "rank 11 on node-21: in its data loader" in out
    assert "(D nfs_wait_bit_killable, cannot be killed)" in out


def test_flight_records_alone_say_who_is_late(command: Command) -> None:
    done = command(LATE)
    assert "ranks 0, 2-3 wait in it, rank 1 has not called it" in done.out
    assert done.out.splitlines()[-1] == "named: rank 1"


def test_a_layout_says_which_groups_differ(command: Command) -> None:
    flags = ["--layout", "tp=2,pp=4,dp=4,order=tp-cp-pp-dp", "--nproc-per-node", "2"]
    done = command(PIPELINE, *flags)
    assert "all that differ from the largest cluster: 4 whole tp groups, 2 whole pp groups" in (
        done.out
    )
    view = json.loads(command(PIPELINE, *flags, "--json").out)
    assert [each["groups"] for each in view["clusters"]] == [
        "",
        "2 whole tp groups",
        "1 whole tp group",
        "1 whole tp group",
    ]
    assert view["clusters"][3]["named"] == ["node-35"]
    assert view["verdict"]


def test_processes_without_a_rank_are_counted_by_machine(command: Command) -> None:
    out = command(COUNTS).out
    assert "8 processes on 4 machines: in a collective (broadcast)" in out


def test_one_file_and_standard_input_will_do(command: Command) -> None:
    text = (NFS / "stacks.txt").read_bytes() if (NFS / "stacks.txt").exists() else b""
    text = (
        text or next(each for each in sorted(NFS.iterdir()) if each.suffix == ".txt").read_bytes()
    )
    done = command("-", stdin=text)
    assert done.code == 0
    assert "verdict: " in done.out


def test_a_dump_is_what_exists_and_a_job_what_does_not(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "0.txt").write_bytes(next(NFS.glob("*.txt")).read_bytes())
    assert command("gpt").code == 0
    assert "There is no job gpt" in command("--job", "gpt").err
    assert "There is no job other" in command("other").err


def test_files_that_are_no_dumps_do_not_hide_those_that_are(
    command: Command, tmp_path: Path
) -> None:
    shutil.copytree(LOADER, tmp_path, dirs_exist_ok=True)
    torn = bytearray(gzip.compress(bytes(range(256)) * 99))
    torn[20:50] = b"\xff" * 30
    (tmp_path / "torn.json.gz").write_bytes(torn)
    (tmp_path / "deep.json").write_bytes(b'{"frames":' * 100_000)
    (tmp_path / "records.json").write_bytes(b'{"entries":' + b"[" * 900 + b"]" * 900 + b"}")
    (tmp_path / "far.json").write_bytes(b'[{"frames": [{"name": "f", "line": 1e999}]}]')
    whole, done = command(str(LOADER)), command(str(tmp_path))
    assert done.code == 0, done.err
    assert done.out.splitlines()[0] == whole.out.splitlines()[0]
    assert "torn.json.gz: Error -3" in done.out


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (
            ["{tmp}/none.txt"],
            2,
            "There is no {tmp}/none.txt: give files or directories with dumps.",
        ),
        (["{tmp}", "other"], 2, "There is no other: give files"),
        (["{tmp}"], 2, "There is no stack dump and no flight record in {tmp} (1 files): give what"),
        (["{tmp}", "--job", "j"], 2, "Name a job with --job, or give dumps, not both."),
        (["{tmp}", "--last"], 2, "--last is for the looks of a job"),
        (["--layout", "tp=2"], 2, "A job knows its layout"),
        ([str(LOADER), "--layout", "tp=2"], 2, "--layout tp=2 has 2 ranks, and there is a dump of"),
        ([str(LOADER), "--layout", "two"], 2, "--layout two: 'two' is no size"),
        ([str(LOADER), "--nproc-per-node", "0"], 2, "--nproc-per-node 0: a machine has 1 rank"),
    ],
)
def test_bad_input_is_one_sentence(
    command: Command, tmp_path: Path, words: list[str], code: int, sentence: str
) -> None:
    (tmp_path / "train.log").write_text("step 1 loss 3.0\n")
    done = command(*(word.replace("{tmp}", str(tmp_path)) for word in words))
    assert done.code == code
    assert done.err.startswith("everstep: " + sentence.replace("{tmp}", str(tmp_path)))
    assert done.err.count("\n") == 1
    assert not done.out


# --- a job ---------------------------------------------------------------------------------------


def view(number: int = 4, **changed: Any) -> LookView:
    def shown(stack: Fingerprint, ranks: tuple[int, int], doing: str) -> ClusterView:
        count = ranks[1] - ranks[0] + 1
        return ClusterView(
            count=count, ranks=(ranks,), machines=1, named=("m1",), groups="", doing=doing,
            state="S", wchan="", stack=stack, why_none="", children=(),
        )  # fmt: skip

    def stack(name: Fingerprint, inner: str) -> Stack:
        frames = tuple(Frame(name=each, file="t.py", line=7) for each in (inner, "step", "main"))
        return Stack(fingerprint=name, threads=(Thread(frames=frames, main=True),))

    told: dict[str, Any] = {
        "number": number,
        "purpose": Purpose.ASKED,
        "why": "anna wants to see them",
        "round": 1,
        "asked_at": 1e9,
        "asked": 2,
        "silent": (),
        "clusters": (shown(MOST, (0, 2), "in a collective"), shown(ODD, (3, 3), "in a sleep")),
        "outliers": "",
        "stood": (),
        "unreached": (("m0", "m1"),),
        "remarks": (),
        "result": LookResult.SHOWN,
        "verdict": "rank 3 sleeps while 3 of 4 ranks wait",
        "judged_ranks": ((3, 3),),
        "judged_machines": ("m1",),
        "judged_group": "",
        "stacks": (stack(MOST, "all_reduce"), stack(ODD, "sleep")),
    }
    return LookView(**(told | changed))


class Looking(FakeController):
    """A controller whose look is judged at the third question."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.asked: list[dict[str, str]] = []
        self.newest: LookView | None = view()
        self.refusal: Refusal | None = None
        self.on_question: Callable[[int], None] = lambda _: None

    def reply(self, path: str, body: Any) -> Any:
        if self.refusal is not None:
            raise self.refusal
        super().reply(path, body)
        return LookAsked(after=3)

    def answer(self, path: str, query: dict[str, str]) -> Any:
        assert path == "/v1/stacks"
        self.asked.append(query)
        self.on_question(len(self.asked))
        going = UnderWay(number=4, why="", asked=2, answered=1, fetching=0, age_s=1.0)
        if query["after"] == "3" and len(self.asked) < 3:
            return StacksView(job=JobId("j"), under_way=going if len(self.asked) > 1 else None)
        return StacksView(job=JobId("j"), newest=self.newest)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Looking]:
    made = Looking(job_in(tmp_path / "home"))
    made.come()
    yield made
    made.go()


def test_a_look_is_asked_for_and_awaited(command: Command, controller: Looking) -> None:
    done = command()
    assert done.code == 0
    assert [path for path, _ in controller.posted] == ["/v1/stacks"]
    assert controller.posted[0][1]["by"]
    assert [each["after"] for each in controller.asked] == ["3", "3", "3"]
    assert done.err.splitlines() == [
        "everstep: waiting for the look to begin",
        "everstep: look 4: 1 of 2 machines have answered",
    ]
    lines = done.out.splitlines()
    assert lines[0].startswith("job j, look 4, ")
    assert lines[0].endswith(": anna wants to see them")
    at = lines.index("rank 3 on m1: in a sleep")
    assert lines[at + 1 : at + 3] == ["    sleep (t.py:7)", "    ... 2 frames in common"]
    assert "m1 could not be reached from m0" in lines
    assert lines[-2:] == ["verdict: rank 3 sleeps while 3 of 4 ranks wait", "named: m1; rank 3"]


def test_the_newest_look_is_shown_and_none_is_taken(command: Command, controller: Looking) -> None:
    done = command("--last", "j", "--json")
    assert not controller.posted
    assert msgspec.json.decode(done.out, type=LookView) == view()
    controller.newest = None
    done = command("--last")
    assert done.code == 1
    assert done.err == (
        "everstep: Nobody has looked at the stacks of job j so far: leave out --last to look at"
        " them now.\n"
    )


def test_a_controller_that_comes_back_goes_on_with_the_look(
    command: Command, controller: Looking
) -> None:
    def gone(question: int) -> None:
        if question == 2:
            controller.later(controller.go, controller.come)

    controller.on_question = gone
    done = command("--json")
    assert done.code == 0
    assert json.loads(done.out)["number"] == 4
    assert not done.err


def test_what_the_controller_declines_is_said(command: Command, controller: Looking) -> None:
    controller.refusal = Refusal(409, "no ranks run now (the job is starting)")
    done = command()
    assert (done.code, done.err) == (1, "everstep: no ranks run now (the job is starting)\n")


def test_a_look_that_does_not_end_is_given_up(
    command: Command, controller: Looking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "NO_NEWS_S", 0.0)
    controller.newest = None
    done = command()
    assert done.code == 1
    assert "The look is not finished" in done.err


def test_a_job_that_is_over_has_only_its_last_look(command: Command, controller: Looking) -> None:
    controller.end()
    done = command()
    assert done.code == 2
    assert done.err == (
        "everstep: Job j is over (finished: so it was): --last shows the newest look that was taken"
        " while it ran.\n"
    )


def test_a_job_without_a_controller_says_so(command: Command, tmp_path: Path) -> None:
    job_in(tmp_path / "home")
    done = command()
    assert done.code == 1
    assert "has not said where it listens" in done.err


def test_many_clusters_are_cut_and_counted(command: Command, controller: Looking) -> None:
    first = view().clusters[0]
    many = [msgspec.structs.replace(first, ranks=((n, n),), count=1) for n in range(40)]
    controller.newest = view(clusters=(first, *many))
    out = command("--last").out
    assert "in 29 smaller clusters: see --full or --json" in out
    assert out.count("the same stack as the largest cluster") == 12
    assert command("--last", "--full").out.count("rank 39 on m1") == 1
