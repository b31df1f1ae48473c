"""`everstep diagnose`: the files of a failed job in, one answer out."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from everstep.cli import main
from tests.diagnosis.casebook import CASES

ECC = CASES / "02-local-and-global-rank"
FUSE = CASES / "06-fuse-mount-died"
LAYOUT = {
    "world_size": 48,
    "machines": 6,
    "hosts": [f"node-{number}" for number in range(27, 33)],
}


class Done(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def answer(self) -> dict[str, Any]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


Command = Callable[..., Done]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    def call(*words: str | Path, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "argv", ["everstep", "diagnose", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "train.log").write_bytes((ECC / "train.log").read_bytes())
    return folder


def without_places(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key != "evidence"}


def test_files_directories_and_standard_input_give_one_answer(
    command: Command, logs: Path, tmp_path: Path
) -> None:
    layout = tmp_path / "job.json"
    layout.write_text(json.dumps(LAYOUT))
    raw = (logs / "train.log").read_bytes()
    asked = ["--json", "--layout", layout]
    one = command(*asked, logs / "train.log")
    assert one.code == 0
    assert one.answer["category"] == "gpu_memory_error"
    assert one.answer["first_action"] == "evict_machine"
    assert one.answer["accused_machines"] == ["node-31"]
    assert one.answer["accused_ranks"] == [37]
    assert one.answer["evidence"][0]["place"]["line"] == 9
    packed = tmp_path / "packed"
    packed.mkdir()
    for name, pack in (("a.gz", gzip.compress), ("b.bz2", bz2.compress), ("c.xz", lzma.compress)):
        (packed / name).write_bytes(pack(raw))
        found = command(*asked, packed / name)
        assert without_places(found.answer) == without_places(one.answer)
    assert without_places(command(*asked, logs).answer) == without_places(one.answer)
    found = command(*asked, "-", stdin=raw)
    assert without_places(found.answer) == without_places(one.answer)


def test_people_get_a_table_and_the_lines(command: Command, logs: Path) -> None:
    done = command(logs)
    assert done.code == 0
    assert "gpu memory error" in done.out
    assert "evict machine" in done.out
    assert "rank 37" in done.out
    assert "train.log:9  cuda.ecc, root" in done.out
    assert "uncorrectable ECC error encountered" in done.out


def test_nothing_failed_is_an_answer(command: Command, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("".join(f"step {n} loss 2.{n:03}\n" for n in range(300)) + "training done\n")
    done = command("--json", log)
    assert done.code == 0
    assert done.answer["category"] == "none"
    assert done.answer["first_action"] == "none"


SITE = """
[[rule]]
id = "site.pdu"
source = "our power units"
match = ['PDU \\w+ tripped on (?P<machine>[\\w-]+)']
role = "root"
grade = "host"
category = "gpu_unavailable"
root = "infrastructure"
verdict = "evict"
accuses = "named"
why = "a power unit switched a machine off"
examples = ["PDU r7 tripped on node-12"]
"""


def test_a_rule_of_the_site_speaks(command: Command, tmp_path: Path) -> None:
    rules, log, layout = (tmp_path / name for name in ("site.toml", "job.log", "job.json"))
    rules.write_text(SITE)
    log.write_text("step 1 loss 2.0\n2026-01-02 03:04:05 PDU r7 tripped on node-12\n")
    layout.write_text(json.dumps({"hosts": ["node-11", "node-12"]}))
    done = command("--json", "--rules", rules, "--layout", layout, log)
    assert done.answer["category"] == "gpu_unavailable"
    assert done.answer["accused_machines"] == ["node-12"]
    assert done.answer["evidence"][0]["rule"] == "site.pdu"


def test_scripts_and_configuration_in_a_directory_are_no_output(
    command: Command, logs: Path
) -> None:
    (logs / "notes.toml").write_text("trap = 'EXT4-fs error (device nvme0n1): bad block'\n")
    told = command("--json", logs).answer
    assert told["category"] == "gpu_memory_error"
    assert not any("notes.toml" in each["place"]["file"] for each in told["evidence"])


def test_numbers_in_a_form_of_the_site_are_judged(command: Command, tmp_path: Path) -> None:
    rules, log = tmp_path / "site.toml", tmp_path / "job.log"
    rules.write_text("[[metric]]\nmatch = 'TICK<(?P<step>\\d+)> cost~(?P<loss>\\S+)'\n")
    lines = [f"TICK<{n}> cost~{'nan' if n > 200 else 2.5}\n" for n in range(260)]
    log.write_text("".join(lines))
    assert command("--json", log).answer["category"] == "none"
    assert command("--json", "--rules", rules, log).answer["category"] == "nan_value"


def test_what_cannot_be_read_is_named_and_the_rest_is_answered(
    command: Command, logs: Path
) -> None:
    (logs / "cut.log.gz").write_bytes(gzip.compress(b"step 1\n" * 9999)[:60])
    done = command("--json", logs)
    assert done.answer["category"] == "gpu_memory_error"
    assert len(done.answer["unread"]) == 1
    assert "cut.log.gz" in done.answer["unread"][0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["/no/such/file"], "There is no /no/such/file."),
        (["{empty}"], "There is no file in"),
        (["--layout", "{broken}", "{log}"], "is no layout"),
        (["--rules", "{broken}", "{log}"], "is no table of rules"),
        (["--rules", "{metric}", "{log}"], "unknown group lozz"),
    ],
)
def test_a_wrong_question_gets_one_sentence(
    command: Command, tmp_path: Path, words: list[str], says: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").write_text("{[")
    (tmp_path / "log").write_text("step 1\n")
    (tmp_path / "metric").write_text("[[metric]]\nmatch = '(?P<step>\\d+) (?P<lozz>\\d+)'\n")
    names = {name: tmp_path / name for name in ("empty", "broken", "log", "metric")}
    done = command(*(word.format(**names) for word in words))
    assert done.code == 2
    assert says in done.err
    assert done.err.count("\n") == 1


def test_pods_and_their_machines_belong_together(command: Command) -> None:
    files = [file for file in FUSE.iterdir() if file.suffix in {".log", ".txt"}]
    done = command("--json", *files)
    assert done.answer["accused_machines"] in (["node-58"], [])
    assert done.answer["category"] == "filesystem_mount"
