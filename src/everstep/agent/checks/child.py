"""`python -P -m everstep.agent.checks.child MODULE:CLASS DIR`: takes samples of one source.

For sources that may hang: a driver, a file system. Started by children.py, which asks on standard
input and reads the answers on standard output, one message each: four bytes of length, then
msgpack. It ends with its input. DIR is the machine's directory, by which `everstep clean` knows it.

What the source's libraries print goes nowhere: it must not get between the answers.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from importlib import import_module
from typing import BinaryIO

import msgspec

from everstep.agent.checks.check import AnySource, Here
from everstep.agent.checks.judging import Failed, attempt
from everstep.model import Seconds, Value

NICE = 5
"""Behind the ranks, but with a third of a core in any case: with less, a busy machine would look
like a driver that hangs."""
LENGTH_BYTES = 4
MESSAGE_BYTES_MAX = 4 << 20


class Answer(Value, frozen=True, kw_only=True):
    """To one request; the first comes unasked and says that the source is made."""

    sample: bytes = b""
    why: str = ""
    """Why there is no sample; empty if there is one."""
    defect: bool = False
    cpu_s: Seconds = 0.0
    """What this process has used since it began."""


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(LENGTH_BYTES, "little") + message


def main() -> None:
    """Answer until the input ends."""
    name = sys.argv[1]
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    os.nice(NICE)
    source = attempt(lambda: _make(name))
    if isinstance(source, Failed):
        _answer(answers, source)
        return
    _answer(answers, b"")
    decode = msgspec.msgpack.Decoder(Here).decode
    while (request := _read(requests)) is not None:
        here = decode(request)
        _answer(answers, attempt(partial(_sample, source, here)))


def _sample(source: AnySource, here: Here) -> bytes:
    return msgspec.msgpack.encode(source.sample(here))


def _make(name: str) -> AnySource:
    module, _, cls = name.partition(":")
    made: AnySource = getattr(import_module(module), cls)()
    return made


def _read(requests: BinaryIO) -> bytes | None:
    length = requests.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    return requests.read(int.from_bytes(length, "little"))


def _answer(answers: BinaryIO, outcome: bytes | Failed) -> None:
    cpu_s = time.process_time()
    if isinstance(outcome, Failed):
        answer = Answer(why=outcome.why, defect=outcome.defect, cpu_s=cpu_s)
    elif len(outcome) > MESSAGE_BYTES_MAX // 2:
        answer = Answer(why=f"its sample has {len(outcome)} bytes", defect=True, cpu_s=cpu_s)
    else:
        answer = Answer(sample=outcome, cpu_s=cpu_s)
    try:
        answers.write(framed(msgspec.msgpack.encode(answer)))
    except BrokenPipeError:
        sys.exit(0)  # nobody asks any more


if __name__ == "__main__":
    main()
