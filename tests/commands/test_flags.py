"""The words after `everstep run` become RunFlags, or one sentence."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from everstep.commands.flags import (
    FLAGS,
    HelpRequested,
    Kept,
    RunFlags,
    parse,
    pet_refusal,
    reference_page,
)
from everstep.model import UserError


def torchrun_source() -> str:
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.submodule_search_locations is not None
    return (Path(torch.submodule_search_locations[0]) / "distributed" / "run.py").read_text()


def test_every_flag_of_torchrun_is_in_the_table_with_both_spellings() -> None:
    theirs = set(re.findall(r'^ {8}"(-[-a-z_]+)",$', torchrun_source(), re.MULTILINE))
    assert {"--nnodes", "--nproc_per_node", "-m", "--virtual-local-rank"} <= theirs
    ours = {name for flag in FLAGS if flag.kept is not Kept.OURS for name in flag.spellings}
    assert theirs <= ours


def test_no_flag_is_called_torchruns_that_is_not() -> None:
    named = {flag.names[-1] for flag in FLAGS if flag.kept is not Kept.OURS}
    assert [name for name in named if f'"{name}"' not in torchrun_source()] == []


def test_every_flag_that_means_something_has_a_field_and_no_other_has() -> None:
    kept = {flag.field for flag in FLAGS if flag.kept in (Kept.SAME, Kept.OURS)}
    assert kept == set(RunFlags.__struct_fields__) - {"script", "script_args", "given", "notes"}


def test_what_follows_the_script_is_the_scripts() -> None:
    flags = parse(["--standalone", "train.py", "--lr", "3", "--job", "x", "--", "-h"])
    assert flags.script == "train.py"
    assert flags.script_args == ("--lr", "3", "--job", "x", "--", "-h")
    assert flags.job is None


@pytest.mark.parametrize("before", ["", "--nproc-per 2", "-r 3", "-m", "--log-dir=x", "--"])
def test_a_flag_of_the_script_is_no_abbreviation_of_ours(before: str) -> None:
    flags = parse([*before.split(), "train.py", "--log", "x", "--n=3", "--st"])
    assert flags.script == "train.py"
    assert flags.script_args == ("--log", "x", "--n=3", "--st")


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--nproc-per-node 2", "nproc_per_node", "2"),
        ("--nproc_per_node=2", "nproc_per_node", "2"),
        ("--nproc-per 2", "nproc_per_node", "2"),
        ("-r3", "redirects", "3"),
        ("-t 0:3", "tee", "0:3"),
        ("-m", "module", True),
        ("--max-restarts 7", "max_restarts", 7),
        ("--preload a --preload b", "preload", ("a", "b")),
        ("--local_machines 4", "local_machines", 4),
    ],
)
def test_a_flag_is_read_as_torchrun_reads_it(words: str, field: str, value: object) -> None:
    assert getattr(parse([*words.split(), "t.py"]), field) == value


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "No script was given"),
        ("--nnodes 2", "No script was given"),
        ("--node-rank one t.py", "--node-rank one is not a whole number"),
        ("--bogus t.py", "Unrecognized arguments: --bogus"),
        ("--nnodes", "Argument --nnodes: expected one argument"),
        ("--virtual-local-rank t.py", "--virtual-local-rank is refused: LOCAL_RANK is always"),
        ("--logs-specs mine t.py", "--logs-specs is refused"),
    ],
)
def test_a_wrong_flag_is_one_sentence(words: str, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        parse(words.split())
    assert str(raised.value).startswith(sentence)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2


def test_an_ignored_flag_says_why() -> None:
    (note,) = parse(["--monitor-interval", "2", "t.py"]).notes
    assert note.startswith("--monitor-interval is ignored: the kernel tells")


def test_help_names_every_flag() -> None:
    with pytest.raises(HelpRequested) as raised:
        parse(["--help"])
    assert all(flag.names[-1] in str(raised.value) for flag in FLAGS)


def test_variables_of_torchrun_are_refused_with_the_flag_to_write() -> None:
    assert pet_refusal(["PATH", "PET_SOMETHING"]) is None
    refusal = pet_refusal(["PET_NNODES", "PET_NPROC_PER_NODE"])
    assert refusal is not None
    assert '--nnodes "$PET_NNODES" --nproc-per-node "$PET_NPROC_PER_NODE"' in refusal


def test_the_page_gives_a_reason_for_every_flag_that_is_not_kept() -> None:
    page = reference_page()
    for flag in FLAGS:
        (row,) = [line for line in page.splitlines() if f"`{flag.names[-1]}`" in line[:60]]
        assert flag.note[-20:] in row
