"""When something is said, when it is said again, and when it is over: tables and chance."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.agent.checks.check import Here, History, Limits, Stamped
from everstep.agent.checks.judging import ITEMS_MAX, SEVERITY, judge
from everstep.agent.checks.monitor import Monitor, Remembered, Said
from everstep.diagnosis.words import Verdict
from everstep.events import AlertCleared, AlertRaised
from everstep.health import Counts, Result
from everstep.model import MachineId
from tests.agent.checks.parts import Silence, Strikes, Words, WordsCheck

M = MachineId("m0")
HERE = Here()
NEVER_READ = "never read"


def fresh(*checks: type[WordsCheck]) -> Monitor:
    made = [check(Limits()) for check in checks or (WordsCheck,)]
    return Monitor(M, made, Remembered())


def look(monitor: Monitor, at: float, **items: str) -> list[Said]:
    return monitor.sampled("words", HERE, Stamped(at=at, sample=Words(verdicts=items)))


def short(said: list[Said]) -> list[str]:
    return [
        f"{each.alert.result.item}: {each.alert.result.verdict}"
        if isinstance(each, AlertRaised)
        else f"{each.item} over"
        for each in said
    ]


# --- one alert per item --------------------------------------------------------------------------


def test_a_fail_is_said_at_once_and_once() -> None:
    monitor = fresh()
    assert short(look(monitor, 0, a="warn", b="info")) == ["a: warn"]
    assert look(monitor, 2, a="warn", b="info") == []
    assert short(look(monitor, 4, a="warn", b="warn")) == ["b: warn"]
    assert look(monitor, 10_000, a="warn", b="warn") == []


def test_it_is_said_again_when_it_is_worse_and_not_when_it_is_better() -> None:
    monitor = fresh()
    look(monitor, 0, a="suspect")
    assert look(monitor, 2, a="warn") == []
    assert look(monitor, 4, a="suspect") == []
    assert short(look(monitor, 6, a="evict")) == ["a: evict"]
    assert look(monitor, 8, a="suspect") == []
    assert look(monitor, 10, a="evict") == []


def test_it_is_over_when_it_has_passed_for_long_enough() -> None:
    monitor = fresh()
    look(monitor, 0, a="warn")
    assert look(monitor, 10, a="info") == []
    assert look(monitor, 69, a="info") == []
    assert short(look(monitor, 70, a="info")) == ["a over"]
    assert look(monitor, 200, a="info") == []
    assert short(look(monitor, 201, a="warn")) == ["a: warn"], "a new one"


def test_what_flaps_is_one_alert() -> None:
    monitor = fresh()
    look(monitor, 0, a="warn")
    for at in range(10, 1000, 20):
        assert look(monitor, at, a="info") == []
        assert look(monitor, at + 10, a="warn") == []


def test_what_counts_twice_is_said_again_after_its_time() -> None:
    monitor = fresh(Strikes)
    assert short(look(monitor, 0, a="warn")) == ["a: warn"]
    assert look(monitor, 99, a="warn") == []
    assert short(look(monitor, 100, a="warn")) == ["a: warn"]
    assert look(monitor, 180, a="info") == []
    assert look(monitor, 199, a="warn") == [], "it flaps"
    assert short(look(monitor, 205, a="warn")) == ["a: warn"]


def test_an_item_that_vanishes_is_over_after_the_same_time() -> None:
    monitor = fresh()
    look(monitor, 0, a="warn")
    assert look(monitor, 1, b="info") == []
    assert look(monitor, 2, a="warn") == []
    assert look(monitor, 3) == []
    assert short(look(monitor, 63)) == ["a over"]


# --- could not run -------------------------------------------------------------------------------


def test_an_error_is_neither_a_fail_nor_a_pass() -> None:
    monitor = fresh()
    look(monitor, 0, a="warn")
    assert look(monitor, 10, a="info") == []
    for at in range(20, 3000, 10):
        assert look(monitor, at, a="error") == [], "what was said holds, and nothing is added"
    assert short(look(monitor, 3000, a="info")) == ["a over"]


def test_an_error_that_lasts_is_said_once_and_its_end_too() -> None:
    monitor = fresh()
    assert monitor.not_sampled("words", NEVER_READ, 0) == []
    assert monitor.not_sampled("words", NEVER_READ, 599) == []
    said = monitor.not_sampled("words", NEVER_READ, 600)
    assert short(said) == [": error"]
    assert isinstance(said[0], AlertRaised)
    assert said[0].alert.result.why == NEVER_READ
    assert monitor.not_sampled("words", NEVER_READ, 900) == []
    assert look(monitor, 1000, a="info") == []
    assert short(look(monitor, 1060, a="info")) == [" over"]
    assert monitor.could_not_run["test.words"] == 4


def test_an_error_between_two_passes_starts_its_time_anew() -> None:
    monitor = fresh()
    for at in range(0, 6000, 500):
        assert look(monitor, at, a="error") == []
        assert look(monitor, at + 1, a="info") == []


def test_a_fail_takes_the_place_of_an_error_that_was_said() -> None:
    monitor = fresh()
    look(monitor, 0, a="error")
    assert short(look(monitor, 600, a="error")) == ["a: error"]
    assert short(look(monitor, 602, a="warn")) == ["a: warn"]


def test_nothing_vanishes_while_its_check_could_not_run() -> None:
    monitor = fresh()
    look(monitor, 0, a="warn")
    for at in range(1, 500, 50):
        assert look(monitor, at, **{"": "error"}) == []
        assert monitor.not_sampled("words", NEVER_READ, at + 1) == []
    assert monitor.alerts()


def test_a_defective_judge_is_an_error_with_a_count() -> None:
    monitor = fresh()
    look(monitor, 0, a="warn")
    assert look(monitor, 1, a="defect") == []
    assert monitor.defects["test.words"] == 1
    (result,) = monitor.latest["test.words"]
    assert result.verdict is Verdict.ERROR
    assert result.why.startswith("it is defective: KeyError 'a' at parts.py:")
    assert [each.item for each in monitor.alerts()] == ["a"]


# --- bounds and limits ---------------------------------------------------------------------------


def test_a_flood_of_items_is_bounded_and_fails_come_first() -> None:
    monitor = fresh()
    many = {f"good{n}": "info" for n in range(ITEMS_MAX)} | {"bad": "warn"}
    assert short(look(monitor, 0, **many)) == ["bad: warn"]
    assert monitor.dropped["test.words"] == 1
    said = look(monitor, 1, **{f"bad{n}": "warn" for n in range(2 * ITEMS_MAX)})
    assert len(said) == ITEMS_MAX - 1
    assert look(monitor, 2, **{f"other{n}": "warn" for n in range(ITEMS_MAX)}) == []
    assert len(monitor.alerts()) == ITEMS_MAX


@pytest.mark.parametrize(
    ("verdict", "at_most", "becomes", "counts"),
    [
        ("evict", Verdict.EVICT, Verdict.EVICT, Counts.TWICE),
        ("evict", Verdict.WARN, Verdict.WARN, Counts.NEVER),
        ("warn", Verdict.WARN, Verdict.WARN, Counts.NEVER),
        ("evict", Verdict.SUSPECT, Verdict.SUSPECT, Counts.NEVER),
        ("job", Verdict.SUSPECT, Verdict.JOB, Counts.NEVER),
        ("evict", Verdict.INFO, Verdict.INFO, Counts.NEVER),
        ("error", Verdict.WARN, Verdict.ERROR, Counts.NEVER),
    ],
)
def test_limits_cap_what_a_check_says(
    verdict: str, at_most: Verdict, becomes: Verdict, counts: Counts
) -> None:
    """What may only warn must not evict by being counted either."""
    sample = Stamped(at=0, sample=Words(verdicts={"a": verdict}))
    history = History(first=sample, now=sample)
    (result,) = judge(WordsCheck(Limits(at_most=at_most)), HERE, history).results
    assert (result.verdict, result.counts) == (becomes, counts)


def test_what_cannot_be_sent_is_mended_before_it_is_said() -> None:
    monitor = fresh()
    (said,) = look(monitor, 0, **{"\udcff" * 1000: "warn"})
    assert isinstance(said, AlertRaised)
    assert msgspec.json.encode(said)
    assert len(said.alert.result.item) == 256


def test_a_check_sees_as_many_samples_as_it_wants() -> None:
    monitor = fresh()
    for at in range(10):
        look(monitor, at, a="info")
    (result,) = monitor.latest["test.words"]
    assert result.values == {"seen": 4}
    assert len(monitor.remembered().histories["words"].past) == 3
    assert monitor.remembered().histories["words"].first.at == 0


# --- silence of a child --------------------------------------------------------------------------


SILENCE = Result(check="test.silence", verdict=Verdict.EVICT, why="no answer", do="Reboot it.")


def test_what_the_silence_of_a_child_means_is_handled_like_any_result() -> None:
    monitor = fresh(WordsCheck, Silence)
    look(monitor, 0, a="warn")
    assert short(monitor.unanswered("words", SILENCE, "silent", 1)) == [": evict"]
    assert monitor.unanswered("words", SILENCE, "silent", 2) == []
    assert monitor.unanswered("words", None, "silent", 3) == []
    assert {each.check for each in monitor.alerts()} == {"test.words", "test.silence"}
    assert look(monitor, 10, a="warn") == []
    assert [each.verdict for each in monitor.latest["test.silence"]] == [Verdict.INFO]
    said = look(monitor, 70, a="warn")
    assert [each.check for each in said if isinstance(each, AlertCleared)] == ["test.silence"]


def test_limits_hold_for_what_silence_means() -> None:
    assert fresh().unanswered("words", SILENCE, "silent", 1) == [], "its check is off"
    weak = Monitor(M, [Silence(Limits(at_most=Verdict.WARN))], Remembered())
    assert short(weak.unanswered("words", SILENCE, "silent", 1)) == [": warn"]


# --- from one agent to the next ------------------------------------------------------------------


def test_a_new_agent_says_again_what_holds_and_what_is_over() -> None:
    monitor = fresh(Strikes)
    look(monitor, 0, a="warn", b="warn")
    look(monitor, 40, a="warn")
    assert short(look(monitor, 70, a="warn")) == ["b over"]
    after = Monitor(M, [Strikes(Limits())], monitor.remembered())
    said = after.told_again(80)
    assert short(said) == ["a: warn", "b over"]
    assert isinstance(said[0], AlertRaised)
    assert said[0].alert.age_s == 80
    assert look(after, 99, a="warn") == [], "and does not take it for news"
    assert short(look(after, 100, a="warn")) == ["a: warn"]
    assert short(after.told_again(10_000)) == ["a: warn"]


def test_an_alert_of_a_check_that_is_gone_is_over() -> None:
    monitor = fresh(WordsCheck, Silence)
    look(monitor, 0, a="warn", b="error")
    monitor.unanswered("words", SILENCE, "silent", 1)
    after = Monitor(M, [], monitor.remembered())
    assert sorted(short(after.told_again(2))) == [" over", "a over"]
    assert after.remembered().standings == []
    off = Monitor(M, [WordsCheck(Limits())], monitor.remembered())
    assert sorted(short(off.told_again(2))) == [" over", "a: warn"]


# --- by chance -----------------------------------------------------------------------------------

WORDS = ["info", "warn", "suspect", "evict", "error", "vanish", "not read"]
STEPS = st.lists(
    st.tuples(st.floats(0.1, 200), st.sampled_from(WORDS), st.sampled_from(WORDS), st.booleans()),
    max_size=40,
)


class Told:
    """The controller's side of one item: what it knows, and that it is told no more than due."""

    def __init__(self, again_s: float) -> None:
        self.again_s = again_s
        self.result: Result | None = None
        self.at = 0.0

    def take(self, said: Said, at: float) -> None:
        if isinstance(said, AlertCleared):
            assert self.result is not None, "nothing was to be cleared"
            self.result = None
            return
        result = said.alert.result
        if self.result is not None:
            worse = SEVERITY[result.verdict] > SEVERITY[self.result.verdict]
            assert worse or at - self.at >= self.again_s
        self.result, self.at = result, at


@given(steps=STEPS, check=st.sampled_from([WordsCheck, Strikes]))
def test_whatever_happens_the_controller_knows_what_holds_and_is_told_once(
    steps: list[tuple[float, str, str, bool]], check: type[WordsCheck]
) -> None:
    monitor, at = fresh(check), 0.0
    told = {"a": Told(check.again_s), "b": Told(check.again_s), "": Told(check.again_s)}
    for wait_s, a, b, restarted in steps:
        at += wait_s
        if restarted:
            monitor = Monitor(M, [check(Limits())], monitor.remembered())
            again = {s.alert.result.item: s for s in monitor.told_again(at) if hasattr(s, "alert")}
            assert set(again) == {item for item, each in told.items() if each.result is not None}
        before = {item: each.result for item, each in told.items()}
        if "not read" in (a, b):
            said = monitor.not_sampled("words", NEVER_READ, at)
        else:
            items = {item: word for item, word in (("a", a), ("b", b)) if word != "vanish"}
            said = look(monitor, at, **items)
        for each in said:
            told[each.item if isinstance(each, AlertCleared) else each.alert.result.item].take(
                each, at
            )
        for item, word in (("a", a), ("b", b)):
            if word == "error" or "not read" in (a, b):
                after = told[item].result
                assert after is before[item] or (before[item] is None and after is not None)
                assert after is None or after is before[item] or after.verdict is Verdict.ERROR
            elif word in ("warn", "suspect", "evict"):
                now = told[item].result
                assert now is not None
                assert SEVERITY[now.verdict] >= SEVERITY[Verdict(word)]
    for then in (at + 1, at + 2 + check.clear_after_s):
        for each in look(monitor, then, a="info", b="info"):
            assert isinstance(each, AlertCleared)
            told[each.item].take(each, then)
    assert not any(each.result for each in told.values())
    assert monitor.remembered().standings == []
