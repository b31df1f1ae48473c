"""The ring of output lines: bounded, and counted on over controllers."""

from __future__ import annotations

import asyncio

from everstep.controller.output import LINE_CHARS_MAX, LINES_MAX, OutputRing
from everstep.events import OutputLines
from everstep.model import Generation, MachineId, Rank, Term


def said(text: str) -> OutputLines:
    return OutputLines(machine=MachineId("a"), rank=Rank(3), generation=Generation(2), text=text)


def test_only_the_newest_lines_are_held_and_a_late_viewer_gets_those() -> None:
    ring = OutputRing(Term(1))
    ring.add(said("".join(f"{n}\n" for n in range(LINES_MAX + 10))))
    lines = ring.after(0).lines
    assert len(lines) == LINES_MAX
    assert (lines[0].text, lines[-1].text) == ("10", str(LINES_MAX + 9))


def test_an_endless_line_is_cut() -> None:
    ring = OutputRing(Term(1))
    ring.add(said("x" * 10 * LINE_CHARS_MAX))
    assert ring.after(0).lines[0].text == "x" * LINE_CHARS_MAX


def test_a_viewer_of_the_former_controller_gets_what_is_new_and_nothing_else() -> None:
    former = OutputRing(Term(1))
    former.add(said("old\n"))
    place = former.after(0).next
    ring = OutputRing(Term(2))
    ring.add(said("new\n"))
    page = ring.after(place)
    assert [line.text for line in page.lines] == ["new"]
    assert ring.after(page.next).lines == []


def test_a_waiting_viewer_is_let_go_at_the_end_of_the_job() -> None:
    async def scenario() -> None:
        ring = OutputRing(Term(1))
        waiting = asyncio.create_task(ring.wait_after(ring.after(0).next, 1000.0))
        await asyncio.sleep(0)
        ring.close()
        page = await waiting
        assert page.lines == []
        assert await ring.wait_after(page.next, 1000.0) == page

    asyncio.run(scenario())
