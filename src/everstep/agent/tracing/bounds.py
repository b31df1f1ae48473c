"""Keeps the text of stacks small enough to travel: a runaway recursion has thousands of frames.

Used by tracer.py. What is cut is the far end: deep frames, threads after the main one.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from everstep.diagnosis.frames import Frame, Thread
from everstep.looks import Stack

THREADS_MAX = 64
FRAMES_MAX = 128
CHARS_MAX = 256
"""Of a name or path."""
STACK_CHARS_MAX = 256 << 10
"""Of all names and paths of one process."""
ANSWER_CHARS_MAX = 2 << 20
"""Of one answer: half a frame of the wire. Whoever asks for more is not told the rest."""
FRAME_CHARS = 16
"""About what a frame needs beside its texts."""


def bounded(threads: Iterable[Thread]) -> tuple[Thread, ...]:
    """The main thread first, then as many others as fit."""
    ordered = sorted(threads, key=lambda thread: not thread.main)
    kept: list[Thread] = []
    room = STACK_CHARS_MAX
    for thread in ordered[:THREADS_MAX]:
        small = replace(
            thread,
            name=thread.name[:CHARS_MAX],
            frames=tuple(_small(frame) for frame in thread.frames[:FRAMES_MAX]),
        )
        room -= _chars(small)
        if room < 0 and kept:
            break
        kept.append(small)
    return tuple(kept)


def within_one_frame(stacks: Iterable[Stack]) -> tuple[Stack, ...]:
    """Those that fit into one answer."""
    kept: list[Stack] = []
    room = ANSWER_CHARS_MAX
    for stack in stacks:
        room -= sum(map(_chars, stack.threads))
        if room < 0:
            break
        kept.append(stack)
    return tuple(kept)


def _small(frame: Frame) -> Frame:
    if len(frame.name) <= CHARS_MAX and len(frame.file) <= CHARS_MAX:
        return frame
    return replace(frame, name=frame.name[:CHARS_MAX], file=frame.file[-CHARS_MAX:])


def _chars(thread: Thread) -> int:
    return sum(len(frame.name) + len(frame.file) + FRAME_CHARS for frame in thread.frames)
