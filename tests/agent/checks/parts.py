"""Sources and checks for tests, with samples as simple as can be. Children import it, too."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits, NotReadable, Source
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts, Result
from everstep.model import Seconds, Value


class Words(Value, frozen=True, kw_only=True):
    """Item -> verdict, as the test wants it judged."""

    verdicts: dict[str, str] = {}


class WordsSource(Source[Words]):
    """Reads "ITEM VERDICT" lines of a file that the test writes."""

    name: ClassVar[str] = "words"
    kind: ClassVar[type[Value]] = Words
    every_s: ClassVar[Seconds] = 0.05

    def absent(self, here: Here) -> str:
        return "" if here.path("/words").exists() else "there are no words"

    def sample(self, here: Here) -> Words:
        text = here.path("/words").read_text()
        if text == "defect":
            raise KeyError(text)
        if text == "secret":
            raise PermissionError(text)
        return Words(verdicts=dict(line.split(" ", 1) for line in text.splitlines()))


class WordsCheck(Check[Words, Limits]):
    """Says what the sample says."""

    name: ClassVar[str] = "test.words"
    source: ClassVar[str] = "words"
    about: ClassVar[str] = "words of a test"
    keep: ClassVar[int] = 3

    def judge(self, here: Here, history: History[Words]) -> Iterable[Result]:
        for item, word in history.now.sample.verdicts.items():
            if word == "defect":
                raise KeyError(item)
            verdict = Verdict(word)
            if verdict is Verdict.INFO:
                yield self.passed("fine", item, seen=len(history.past) + 1)
            elif verdict is Verdict.ERROR:
                yield self.could_not_run("no sight", item)
            else:
                more = {"item": item, "counts": Counts.TWICE}
                yield self.found(verdict, Category.INFINIBAND_ERROR, "bad", "Mend it.", **more)


class Strikes(WordsCheck):
    """Is told again."""

    name: ClassVar[str] = "test.strikes"
    again_s: ClassVar[Seconds] = 100.0
    clear_after_s: ClassVar[Seconds] = 30.0


class Pid(Value, frozen=True, kw_only=True):
    """Of the process that took the sample."""

    pid: int
    nice: int = 0


def spin() -> None:
    while True:
        pass


def not_readable() -> None:
    raise NotReadable("it is in no mood")


def defect() -> None:
    raise KeyError("defect")


MOODS: dict[str, Callable[[], object]] = {
    "hang": lambda: time.sleep(1000),
    "spin": spin,
    "die": lambda: os._exit(3),
    "raise": not_readable,
    "defect": defect,
    "print": lambda: os.write(1, b"garbage" * 1000),
}


class Moody(Source[Pid]):
    """Does in its child what the file "mood" says."""

    name: ClassVar[str] = "moody"
    kind: ClassVar[type[Value]] = Pid
    every_s: ClassVar[Seconds] = 0.1
    blocks: ClassVar[bool] = True
    within_s: ClassVar[Seconds] = 0.4

    def absent(self, here: Here) -> str:
        return ""

    def sample(self, here: Here) -> Pid:
        mood = here.path("/mood").read_text()
        if mood.startswith("garbage"):
            for fd in range(3, 10):
                with contextlib.suppress(OSError):
                    os.write(fd, mood.removeprefix("garbage ").encode("latin-1"))
        elif mood == "huge":
            return Pid(pid=1 << 70)
        elif mood in MOODS:
            MOODS[mood]()
        return Pid(pid=os.getpid(), nice=os.nice(0))

    def unanswered(self, for_s: Seconds, times: int) -> Result | None:
        return Result(
            check="test.mood",
            verdict=Verdict.EVICT,
            why=f"no answer for {for_s:.0f} s, {times} times",
            do="Ask no more.",
        )


class Unimportable(Moody):
    """Cannot even be made in its child."""

    def __init__(self) -> None:
        if sys.argv[0].endswith("child.py"):
            raise OSError("no such driver")


class Silence(WordsCheck):
    """In whose name the source of words speaks when its child is silent; passes otherwise."""

    name: ClassVar[str] = "test.silence"

    def judge(self, here: Here, history: History[Words]) -> Iterable[Result]:
        yield self.passed("it answers")


class PidCheck(Check[Pid, Limits]):
    """Passes if there is an answer."""

    name: ClassVar[str] = "test.pid"
    source: ClassVar[str] = "moody"
    about: ClassVar[str] = "whether a child answers"

    def judge(self, here: Here, history: History[Pid]) -> Iterable[Result]:
        yield self.passed("it answers", pid=history.now.sample.pid)


class Mood(PidCheck):
    """In whose name the moody source speaks of silence."""

    name: ClassVar[str] = "test.mood"
