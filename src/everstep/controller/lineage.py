"""How the code versions of a job follow from each other: what a new one is merged onto, and with.

Used by accepting.py. Reads the core's books and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from everstep.core.history import Condition, VersionBook
from everstep.core.versions import WAITING
from everstep.model import CodeOrigin, VersionId

SHORTEST = 6
"""Digits of an id that name a version, if no other one begins with them."""


class Lineage:
    """The versions of a job at one moment."""

    def __init__(self, books: Iterable[VersionBook], running: VersionId) -> None:
        ordered = sorted(books, key=lambda book: book.number)
        self._books = {book.code.version: book for book in ordered}
        self._running = running

    @property
    def first(self) -> VersionBook | None:
        """The code that the job was submitted with."""
        return next(iter(self._books.values()), None)

    @property
    def running(self) -> VersionBook | None:
        """What runs, or what the next generation runs."""
        return self._books.get(self._running)

    def head(self) -> VersionBook | None:
        """What a new one is put on: the newest that waits, else what runs."""
        waiting = [book for book in self._books.values() if book.condition in WAITING]
        return max(waiting, key=lambda book: book.event, default=self.running)

    def find(self, version: VersionId) -> VersionBook | None:
        """The one with this id."""
        return self._books.get(version)

    def named(self, text: str) -> VersionBook | None:
        """The one that a person means: v3, 3, or the beginning of an id."""
        number = text.removeprefix("v")
        if number.isascii() and number.isdecimal() and len(number) < SHORTEST:
            return next((b for b in self._books.values() if b.number == int(number)), None)
        found = [book for version, book in self._books.items() if version.startswith(text)]
        return found[0] if len(found) == 1 and len(text) >= SHORTEST else None

    def of(self, head: VersionBook) -> list[VersionBook]:
        """The version and all whose changes are in it, the newest first."""
        found: dict[VersionId, VersionBook] = {}
        left = [head.code.version]
        while left:
            book = self._books.get(left.pop(0))
            if book is not None and book.code.version not in found:
                found[book.code.version] = book
                left += [book.code.base, *book.code.includes]
        return list(found.values())

    def base(
        self, head: VersionBook, origin: CodeOrigin, ancestors: Sequence[str]
    ) -> VersionBook | None:
        """What the author of new code from there started from, as far as can be told."""
        for book in self.of(head):
            if _continues(origin, ancestors, book.code.origin):
                return book
        return self.first

    def between(self, head: VersionBook, base: VersionBook) -> list[VersionBook]:
        """Those whose changes came to `base` since, the newest first."""
        known = {book.code.version for book in self.of(base)}
        return [book for book in self.of(head) if book.code.version not in known]

    def rolled_back(self) -> list[VersionBook]:
        """The newest first."""
        bad = [b for b in self._books.values() if b.condition is Condition.ROLLED_BACK]
        return bad[::-1]

    def __iter__(self) -> Iterator[VersionBook]:
        """In the order in which they came first."""
        return iter(self._books.values())


def _continues(origin: CodeOrigin, ancestors: Sequence[str], earlier: CodeOrigin) -> bool:
    """Whether code from `origin` contains what came from `earlier`, or follows it there."""
    if earlier.commit and (earlier.commit in ancestors or earlier.commit == origin.commit):
        return True
    place = (origin.path, origin.host)
    return origin.kind == earlier.kind == "dir" and place == (earlier.path, earlier.host)
