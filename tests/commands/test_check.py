"""`everstep check` as monitors and people call it: a process, its exit code, its first line."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal

import pytest
from rich.console import Console

from everstep.commands.check_report import Absent, Unseen, lines, report, tables, worst
from everstep.commands.screen import console
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from tests.commands.odd_checks import ODD_CHECKS
from tests.commands.odd_host import DEADLINE_S, Host, left, wait_until

# --- exit codes and the first line ---------------------------------------------------------------


def test_a_healthy_machine_is_told_in_few_lines(host: Host) -> None:
    host.says("counter", 5)
    code, out = host.check("--only", "odd.growth")
    assert (code, out) == (0, "EVERSTEP OK - 1 check passed\n--all shows what passed as well\n")


def test_what_passed_is_shown_if_somebody_wants_it(host: Host) -> None:
    host.says("counter", 5)
    code, out = host.check("--only", "odd.growth", "--all")
    assert (code, out.splitlines()[0]) == (0, "EVERSTEP OK - 1 check passed")
    assert re.search(r"pass +odd\.growth +it grew by 0", out)
    assert "--all" not in out


def test_what_failed_stands_beside_what_to_do(host: Host) -> None:
    host.says("counter", 5)
    host.check("--only", "odd.growth")
    host.says("counter", 50)
    _, out = host.check("--only", "odd.growth")
    assert re.search(r"suspect +odd\.growth +it grew by 45.*\n +Look at the counter\.", out)


@pytest.mark.parametrize(("grown", "code"), [(0, 0), (1000, 2)])
def test_a_monitor_that_starts_it_gets_the_exit_code(host: Host, grown: int, code: int) -> None:
    host.says("counter", 0)
    host.check("--only", "odd.growth")
    host.says("counter", grown)
    process = host.start("--only", "odd.growth")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (code, "")
    assert out.startswith("EVERSTEP ")


def test_what_this_machine_does_not_have_is_neither_good_nor_bad(host: Host) -> None:
    code, out = host.check()
    assert (code, out.splitlines()[0]) == (0, f"EVERSTEP OK - {len(ODD_CHECKS)} absent")
    assert "there is no counter (odd.growth, odd.growth_in_child)" in out


def test_many_absent_signals_of_one_topic_are_counted() -> None:
    gone = Absent(checks=("gpu.a", "gpu.b", "gpu.c", "gpu.d", "ib.port"), why="no such thing")
    (line,) = lines(report([], [gone]), everything=False)
    assert line == "absent here: 5: no such thing (4 of gpu, ib.port)"


@pytest.mark.parametrize(
    ("grown", "code", "verdict"), [(5, 0, "info"), (6, 1, "suspect"), (101, 2, "evict")]
)
def test_counters_are_compared_with_the_call_before(
    host: Host, grown: int, code: int, verdict: str
) -> None:
    host.says("counter", 1000)
    assert host.told("--only", "odd.growth")["status"] == "OK"
    host.says("counter", 1000 + grown)
    told = host.told("--only", "odd.growth")
    assert told["exit_code"] == code
    (result,) = told["results"]
    assert result["verdict"] == verdict
    assert result["why"].partition(",")[0] == f"it grew by {grown}"


def test_what_is_read_in_a_child_is_compared_as_well(host: Host) -> None:
    host.says("counter", 0)
    host.check("--only", "odd.growth_in_child")
    host.says("counter", 50)
    assert host.told("--only", "odd.growth_in_child")["results"][0]["verdict"] == "suspect"


def test_a_first_call_looks_twice_so_that_rates_exist(host: Host) -> None:
    host.says("counter", 7)
    (first,) = host.told("--only", "odd.growth")["results"]
    assert first["values"] == {"grown": 0}


def test_what_is_not_asked_this_time_is_not_forgotten(host: Host) -> None:
    host.says("counter", 0)
    host.check("--only", "odd.growth")
    host.says("counter", 50)
    host.check("--only", "even.")
    assert host.told("--only", "odd.growth")["status"] == "WARNING"


def test_a_file_that_holds_garbage_could_not_be_read(host: Host) -> None:
    host.says("counter", "many")
    code, out = host.check()
    assert code == 3
    assert out.startswith("EVERSTEP UNKNOWN - 2 could not run, 3 absent\n")
    assert "Find out why" in out


def test_the_first_line_has_no_performance_data_by_accident(host: Host) -> None:
    host.says("counter", 0)
    host.check()
    host.says("counter", 999)
    _, out = host.check()
    assert out.startswith("EVERSTEP CRITICAL - odd.growth: it grew by 999, more than 5 / ")
    assert "|" not in out.splitlines()[0]


# --- what hangs ----------------------------------------------------------------------------------


def test_a_source_that_hangs_is_a_finding_and_hinders_no_other(host: Host) -> None:
    host.says("counter", 1)
    host.says("hung", "")
    told = host.told()
    assert told["status"] == "CRITICAL"
    assert told["results"][0]["why"] == "the driver does not answer"
    assert [each["verdict"] for each in told["results"][1:]] == ["info", "info"]


def test_the_time_limit_is_for_all_together(host: Host) -> None:
    host.says("counter", 1)
    host.says("slow", "")
    told = host.told("--time-limit", "1", "--only", "odd.growth", "--only", "odd.slow")
    assert told["summary"] == "EVERSTEP UNKNOWN - 1 check passed, 1 could not run"
    assert told["results"][0]["check"] == "odd.slow"
    assert "no answer within the 1 s of --time-limit" in told["results"][0]["why"]
    wait_until(lambda: not left(host))


def test_an_interrupted_call_leaves_nothing_behind(host: Host) -> None:
    slow = host.says("slow", "")
    process = host.start()
    wait_until(lambda: slow.read_text() != "")
    assert left(host)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (130, "")
    assert err == "everstep: interrupted; nothing is known of this machine.\n"
    wait_until(lambda: not left(host))


# --- limits, names, mistakes ---------------------------------------------------------------------


@pytest.mark.parametrize("table", ['["odd.growth"]', "[odd.growth]"])
def test_a_site_sets_limits(host: Host, table: str) -> None:
    limits = host.says("limits.toml", f"{table}\nmost = 50\n")
    host.says("counter", 0)
    host.check("--only", "odd.growth")
    host.says("counter", 40)
    assert host.check("--only", "odd.growth", "--limits", str(limits))[0] == 0
    host.says("counter", 80)
    assert host.check("--only", "odd.growth")[0] == 1


def test_a_site_weakens_a_check_or_turns_it_off(host: Host) -> None:
    limits = host.says(
        "limits.toml", '["odd.growth"]\nat_most = "warn"\n["odd.growth_in_child"]\noff = true\n'
    )
    host.says("counter", 0)
    host.check()
    host.says("counter", 1000)
    told = host.told("--limits", str(limits))
    assert [(each["check"], each["verdict"]) for each in told["results"]] == [
        ("odd.growth", "warn")
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[odd.growth", "is no TOML"),
        ("most = 5", 'most stands outside of a table like ["net.link"]'),
        ('["odd.groth"]\nmost = 5', "there is no check 'odd.groth'"),
        ("[odd.growth]\nmots = 5", "check odd.growth has no limit 'mots': it has at_most, most"),
        ('["odd.growth"]\nmost = "5"', "limits of check odd.growth: Expected `int`, got `str`"),
        ('["odd.growth"]\nat_most = "kill"', "limits of check odd.growth: Invalid enum value"),
    ],
)
def test_a_mistake_in_the_limits_is_unknown_and_not_critical(
    host: Host, content: str, says: str
) -> None:
    limits = host.says("limits.toml", content)
    code, out = host.check("--limits", str(limits))
    assert code == 3
    assert out.startswith("EVERSTEP UNKNOWN - ")
    assert out.count("\n") == 1
    assert str(limits) in out
    assert says in out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--nope"], "No such option"),
        (["--time-limit", "soon"], "--time-limit"),
        (["--time-limit", "0"], "--time-limit"),
        (["--only", "gpu."], "--only gpu.: there is no such check"),
        (["--limits", "/does/not/exist"], "the limits in /does/not/exist cannot be read: No such"),
    ],
)
def test_a_wrong_flag_is_unknown_and_not_critical(host: Host, flags: list[str], says: str) -> None:
    code, out = host.check(*flags)
    assert code == 3
    assert says in out


def test_help_is_no_alarm(host: Host) -> None:
    code, out = host.check("--help")
    assert code == 0
    assert "--time-limit" in out


def test_the_list_has_every_check_with_its_limits(host: Host) -> None:
    code, out = host.check("--list")
    assert code == 0
    assert re.search(r"odd\.growth +a counter grows \(counter\) +2 s +most=5\b", out)
    assert out.splitlines()[-1].startswith("every check also has the limits off=False")
    listed = json.loads(host.check("--list", "--json")[1])
    assert [each["check"] for each in listed] == sorted(check.name for check in ODD_CHECKS)


# --- other users, and a state that cannot be kept ------------------------------------------------


def test_what_an_ordinary_user_may_not_see_is_said_and_is_no_alarm(host: Host) -> None:
    host.says("counter", 1)
    host.says("secret", 1).chmod(0)
    host.state.mkdir()
    host.state.chmod(0o777)
    code, out = host.as_nobody("--only", "odd.growth", "--only", "even.")
    assert code == 0
    assert out.startswith("EVERSTEP OK - 1 check passed, 1 not allowed\n")
    assert re.search(r"what this user cannot see: even\.secret: .*Permission denied", out)
    assert "Permission denied: '" in out
    assert "Run it as root." in out
    code, out = host.as_nobody("--only", "even.secret")
    assert code == 3, "nothing else was looked at"


@pytest.mark.parametrize("mode", [0o000, 0o555], ids=["unreadable", "not to be written"])
def test_a_state_that_cannot_be_kept_is_a_note(host: Host, mode: int) -> None:
    host.says("counter", 1)
    host.state.mkdir()
    host.state.chmod(mode)
    code, out = host.as_nobody("--only", "odd.growth")
    assert code == 0, out
    assert f"note: the state in {host.state} cannot be kept" in out
    host.state.chmod(0o755)
    assert not list(host.state.iterdir())


def test_a_state_that_cannot_even_be_made_is_a_note(host: Host) -> None:
    host.says("counter", 1)
    blocked = host.says("file", "") / "state"
    code, out = host.check("--state", str(blocked))
    assert code == 0
    assert "Not a directory" in out


def test_a_state_that_is_not_written_after_all_is_a_note(host: Host) -> None:
    host.says("counter", 1)
    (host.state / "samples.new").mkdir(parents=True)  # where it is written before it is renamed
    code, out = host.check("--only", "odd.growth")
    assert code == 0
    assert "cannot be kept (it could not be written: is the disk full?)" in out


def test_of_two_calls_at_once_one_writes_the_state(host: Host) -> None:
    host.says("counter", 1)
    host.check("--only", "odd.growth")
    before = [file.read_bytes() for file in host.state.iterdir()]
    other = os.open(host.state, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        host.says("counter", 50)
        told = host.told("--only", "odd.growth")
        assert (told["status"], told["notes"]) == ("WARNING", [])
        assert [file.read_bytes() for file in host.state.iterdir()] == before
    finally:
        os.close(other)
    assert host.told("--only", "odd.growth")["status"] == "WARNING"
    assert host.told("--only", "odd.growth")["status"] == "OK"


def test_a_damaged_state_begins_anew(host: Host) -> None:
    host.says("counter", 1)
    host.check("--only", "odd.growth")
    (kept,) = host.state.iterdir()
    for damaged in (b"", b"\xc1", kept.read_bytes()[:-7]):
        kept.write_bytes(damaged)
        assert host.told("--only", "odd.growth")["status"] == "OK"
    assert len(list(host.state.iterdir())) == 1


@pytest.mark.parametrize(
    ("environ", "below"),
    [({"XDG_STATE_HOME": "xdg"}, "xdg"), ({"XDG_STATE_HOME": "", "HOME": "h"}, "h/.local/state")],
)
def test_without_a_flag_the_state_of_a_user_lies_where_such_things_lie(
    host: Host, environ: dict[str, str], below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(Host, "_places", lambda host, flags: ["--root", str(host.root)])
    host.says("counter", 1)
    host.check(**{name: value and str(host.root / value) for name, value in environ.items()})
    assert list((host.root / below / "everstep" / "check").iterdir())


# --- the report, by itself -----------------------------------------------------------------------


def result(check: str, verdict: Verdict, item: str = "", why: str = "why") -> Result:
    return Result(check=check, item=item, verdict=verdict, why=why, category=Category.NONE)


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ([Verdict.INFO], "OK"),
        ([Verdict.INFO, Verdict.ERROR], "UNKNOWN"),
        ([Verdict.ERROR, Verdict.WARN], "WARNING"),
        ([Verdict.SUSPECT], "WARNING"),
        ([Verdict.JOB], "WARNING"),
        ([Verdict.USER], "WARNING"),
        ([Verdict.WARN, Verdict.EVICT, Verdict.ERROR], "CRITICAL"),
        ([], "UNKNOWN"),
    ],
)
def test_the_worst_result_is_the_status(verdicts: list[Verdict], status: str) -> None:
    results = [result(f"a.{number}", verdict) for number, verdict in enumerate(verdicts)]
    assert report(results).status == status


def test_the_worst_results_come_first_and_three_are_named() -> None:
    results = [result("b.b", Verdict.INFO), result("a.a", Verdict.WARN)]
    results += [result("c.c", Verdict.EVICT, f"{number}", f"why {number}") for number in range(4)]
    told = report(
        results, [Absent(checks=("x.x",), why="none")], [Unseen(checks=("y.y",), why="", do="")]
    )
    assert [each.check for each in told.results] == ["c.c"] * 4 + ["a.a", "b.b"]
    assert told.summary == (
        "EVERSTEP CRITICAL - c.c 0: why 0; c.c 1: why 1; c.c 2: why 2; ...; "
        "1 check passed, 2 failed, 1 not allowed, 1 absent"
    )
    assert worst(told) == "c.c 0: why 0; c.c 1: why 1; c.c 2: why 2"


def test_what_is_the_same_of_many_is_told_once() -> None:
    lost = [result("gpu.lost", Verdict.EVICT, f"GPU {number}") for number in range(8)]
    silent = [result(f"gpu.{name}", Verdict.ERROR, "GPU 0") for name in ("ecc", "power", "remap")]
    told = report([*lost, *silent])
    assert told.summary == (
        "EVERSTEP CRITICAL - gpu.lost GPU 0 and 7 more: why; 1 failed, 3 could not run"
    )
    assert worst(told) == "gpu.lost GPU 0 and 7 more: why"
    assert len(told.results) == 11, "programs get all"
    screen = console()
    with screen.capture() as shown:
        for table in tables(told, everything=True):
            screen.print(table)
    _, *rows = shown.get().splitlines()
    assert [" ".join(row.split()) for row in rows] == [
        "evict gpu.lost GPU 0 and 7 more why",
        "could not run gpu.ecc and 2 more, GPU 0 why",
    ]


@pytest.mark.parametrize("columns", [80, 120])
def test_a_table_is_as_wide_as_the_terminal_and_cuts_nothing(columns: int) -> None:
    failing = Result(
        check="gpu.ecc_uncorrected",
        item="GPU 0000:1b:00.0",
        verdict=Verdict.EVICT,
        why="it counts many errors " * 10 + "(END-OF-WHY)",
        do="Look for a better one " * 10 + "(END-OF-DO)",
    )
    screen = Console(width=columns)
    with screen.capture() as shown:
        for table in tables(report([failing]), everything=False):
            screen.print(table)
    text = shown.get()
    assert max(map(len, text.splitlines())) <= columns
    assert {"gpu.ecc_uncorrected", "0000:1b:00.0", "(END-OF-WHY)", "(END-OF-DO)"} <= {*text.split()}
