"""Golden stories: `pytest tests/transcripts --rewrite-transcripts` writes them anew.

Commit a rewritten story only if you understand every changed line.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.core.invariants import Watch
from tests.transcripts.transcript import Transcript

STORIES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("story", STORIES, ids=lambda path: path.stem)
def test_the_core_decides_as_the_story_says(story: Path, request: pytest.FixtureRequest) -> None:
    text = story.read_text()
    actual = Transcript(Watch()).run(text)
    if request.config.getoption("--rewrite-transcripts"):
        story.write_text(actual)
    assert actual == text


def test_there_are_stories() -> None:
    assert len(STORIES) >= 8
