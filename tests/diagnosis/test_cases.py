"""Every case of the casebook gets full marks: the right kind, a first action that helps, and
nobody innocent accused.
"""

from __future__ import annotations

import pytest

from everstep.diagnosis.findings import Site
from everstep.diagnosis.investigation import Investigation
from everstep.diagnosis.logs import Patterns
from everstep.diagnosis.scanner import Alternatives
from everstep.diagnosis.tables import own_grades, own_rules
from everstep.diagnosis.words import Category, FirstAction
from tests.diagnosis.casebook import Case, answer_to, cases, mark

ALL = list(cases())


@pytest.mark.parametrize("case", ALL, ids=[case.name for case in ALL])
def test_a_case_is_answered_rightly(case: Case) -> None:
    answer = answer_to(case)
    found = mark(case, answer)
    told = f"{answer.category}, {answer.root_class}, {answer.first_action}: {answer.why}"
    assert found.category, f"expected {case.expect['category']}, got {told}"
    assert found.action, f"expected {case.expect['first_action']}, got {told}"
    assert found.innocent, f"accused {answer.accused_ranks} {answer.accused_machines}: {told}"


def test_a_log_in_single_bytes_gives_the_same_answer() -> None:
    case = next(case for case in ALL if case.name.startswith("02"))
    inquiry = Investigation(own_rules(), own_grades(), case.site, Patterns(own_rules()))
    text = inquiry.open("train.log")
    for byte in (case.folder / "train.log").read_bytes():
        text.feed(bytes([byte]))
    inquiry.close(text)
    assert inquiry.answer() == answer_to(case)


def test_without_the_quick_engine_the_answer_is_the_same() -> None:
    case = next(case for case in ALL if case.name.startswith("02"))
    inquiry = Investigation(
        own_rules(), own_grades(), case.site, Patterns(own_rules(), Alternatives)
    )
    text = inquiry.open("train.log")
    text.feed((case.folder / "train.log").read_bytes())
    inquiry.close(text)
    assert inquiry.answer() == answer_to(case)


@pytest.mark.parametrize(
    "prefix",
    [
        "2026-11-29T18:38:09.686Z stderr F ",
        "trainer-1  | ",
        "[pod/train-0/pytorch] ",
        "Nov 29 18:38:09 trn-17 train[411]: ",
    ],
)
@pytest.mark.parametrize("number", ["559", "573"])
def test_what_container_runtimes_put_in_front_changes_no_answer(number: str, prefix: str) -> None:
    case = next(case for case in ALL if case.name.startswith(number))
    inquiry = Investigation(own_rules(), own_grades(), case.site, Patterns(own_rules()))
    text = inquiry.open("job.log")
    for line in (case.folder / "job.log").read_bytes().splitlines(keepends=True):
        text.feed(prefix.encode() + line)
    inquiry.close(text)
    found = mark(case, inquiry.answer())
    assert found.full, f"got {inquiry.answer()}"


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\x00\xff\xfe" * 500, b"hello\r\n" * 3])
def test_texts_that_say_nothing_accuse_nobody(data: bytes) -> None:
    inquiry = Investigation(own_rules(), own_grades(), Site(), Patterns(own_rules(), Alternatives))
    text = inquiry.open("x.log")
    text.feed(data)
    inquiry.close(text)
    answer = inquiry.answer()
    assert (answer.category, answer.first_action) == (Category.NONE, FirstAction.NONE)
    assert not answer.accused_ranks
    assert not answer.accused_machines
