"""The Python traceback that leads to an exception's line.

Used by logs.py: the line says what, the frames before it say where, and "where" tells a bug of the
script from a bad sample, and a side thread from the job. Ranks write into each other's tracebacks,
so only lines with the same label count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from everstep.diagnosis.labels import speaker_of
from everstep.model import Value

LOOK_BACK_LINES = 120

_FRAME = re.compile(
    r'^ *(?:\| *)?File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?'
)
_BEGIN = re.compile(r"(?:Original )?Traceback \(most recent call last\)")
_CHAINED = (
    "During handling of the above exception, another exception occurred",
    "The above exception was the direct cause of the following exception",
)
_IGNORED = re.compile(r"^\W*Exception ignored in")
_THREAD = re.compile(r"Exception in thread (?P<name>[^:]+)")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3|^<frozen|/opt/conda/lib/")
_LOADER = re.compile(
    r"torch/utils/data/|/datasets/|webdataset|litdata|streaming/base|/dali/|torchdata"
    r"|mosaicml.*streaming"
)
_LOADER_FUNCTIONS = frozenset({"__getitem__", "__getitems__", "collate_fn", "_worker_loop"})
_CHECKPOINT = re.compile(
    r"torch/serialization\.py|distributed/checkpoint/|dist_checkpointing|checkpoint(?:ing)?\.py"
    r"|safetensors"
)
_SHARED_MEMORY = re.compile(r"/multiprocessing/(?:synchronize|shared_memory)\.py$")
"""Semaphores and segments lie in /dev/shm, whatever errno says of a device."""
_HTTP = re.compile(r"/urllib/request\.py|/http/client\.py|/(?:requests|urllib3|httpx|aiohttp)/")
_ELASTIC = re.compile(r"torch/distributed/(?:run|launcher|elastic)")


class Trace(Value, frozen=True, kw_only=True):
    """Where an exception came from."""

    frames: tuple[tuple[str, str], ...] = ()
    """File and function, the innermost last."""
    traits: tuple[str, ...] = ()
    """Words that rules ask for: in_thread, in_loader, in_checkpoint, in_launcher, in_library,
    in_memmap, in_shared_memory, in_http, chained (it followed another one), ignored (Python says
    that it went on)."""


def trace_before(lines: Sequence[str], at: int) -> Trace:
    """The traceback that ends in lines[at]."""
    label, _ = speaker_of(lines[at])
    frames: list[tuple[str, str]] = []
    traits: set[str] = set()
    begun = False
    for number in range(at - 1, max(-1, at - LOOK_BACK_LINES), -1):
        speaker, rest = speaker_of(lines[number])
        thread = _THREAD.search(lines[number])
        if begun:
            if thread:
                traits.add("in_thread")
            elif _IGNORED.search(rest):
                traits.add("ignored")
            elif any(words in rest for words in _CHAINED) or not rest.strip():
                traits |= {"chained"} if rest.strip() else set()
                continue
            break
        if speaker.rank != label.rank or speaker.local_rank != label.local_rank:
            continue
        frame = _FRAME.match(rest) or _FRAME.search(lines[number])
        if frame is not None:
            frames.append((frame["file"], frame["function"] or ""))
        elif _BEGIN.search(rest):
            begun = True
    frames.reverse()
    return Trace(frames=tuple(frames), traits=tuple(sorted(traits | _traits_of(frames))))


def _traits_of(frames: Sequence[tuple[str, str]]) -> set[str]:
    if not frames:
        return set()
    traits = set()
    if any(_LOADER.search(file) or function in _LOADER_FUNCTIONS for file, function in frames):
        traits.add("in_loader")
    if any("memmap" in file or "memmap" in function for file, function in frames):
        traits.add("in_memmap")
    if any(_CHECKPOINT.search(file) for file, _ in frames):
        traits.add("in_checkpoint")
    if any(_HTTP.search(file) for file, _ in frames):
        traits.add("in_http")
    if _SHARED_MEMORY.search(frames[-1][0]):
        traits.add("in_shared_memory")
    if any(_ELASTIC.search(file) for file, _ in frames):
        traits.add("in_launcher")
    if _LIBRARY.search(frames[-1][0]):
        traits.add("in_library")
    return traits
