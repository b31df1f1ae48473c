"""What the checks of single GPUs share: one result per GPU, and how counters are compared.

Each file beside this one judges one signal; where a GPU or its driver lacks the signal, it says
nothing of that GPU.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from itertools import pairwise

from everstep.agent.checks.check import Check, Here, History, L, Stamped
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.health import Result
from everstep.model import Seconds

UNDER_LOAD_PERCENT = 50.0
"""NVML's utilization above which a GPU is at work; idle ones slow clocks and links by design."""


class PerGpu(Check[NvmlSample, L]):
    """A check that looks at each GPU by itself."""

    source = "nvml"

    @abstractmethod
    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        """One GPU's history, beside the newest sample of all; None: it has no such signal."""

    def judge(self, here: Here, history: History[NvmlSample]) -> Iterable[Result]:
        del here
        now = history.now.sample
        if now.silent_as_a_whole:
            yield self.could_not_run(now.silent_as_a_whole)
        for gpu in now.gpus:
            result = self.judge_gpu(_of_one(history, gpu), now)
            if result is None and not gpu.values:
                result = self.could_not_run("the GPU tells nothing", item=gpu.name)
            if result is not None:
                yield result


def _of_one(history: History[NvmlSample], now: Gpu) -> History[Gpu]:
    past = tuple(_stamped(history.past, now))
    newest = Stamped(at=history.now.at, sample=now)
    first = next(_stamped((history.first,), now), (*past, newest)[0])
    return History(first=first, past=past, now=newest)


def _stamped(samples: Iterable[Stamped[NvmlSample]], like: Gpu) -> Iterator[Stamped[Gpu]]:
    for each in samples:
        for gpu in each.sample.gpus:
            if (gpu.pci, gpu.index if not gpu.pci else 0) == (
                like.pci,
                like.index if not like.pci else 0,
            ):
                yield Stamped(at=each.at, sample=gpu)


def baseline(history: History[NvmlSample]) -> Stamped[NvmlSample] | None:
    """The first sample that saw GPUs: the very first may be from before NVML had started."""
    every = (history.first, *history.past, history.now)
    return next((each for each in every if each.sample.gpus), None)


def rise(gpu: History[Gpu], signal: Signal, within_s: Seconds) -> tuple[float, Seconds] | None:
    """By how much a counter has risen, and over how many seconds; None: not seen twice.

    At least since the sample before, however long ago: what happened while nobody looked counts.
    A smaller value is a counter that began anew; what it has counted since then is not counted.
    """
    recent = gpu.since(within_s)
    seen = [
        (each.at, value)
        for each in (recent if len(recent) > 1 else (*gpu.past[-1:], gpu.now))
        if (value := each.sample.get(signal)) is not None
    ]
    if len(seen) < 2:
        return None
    risen = sum(max(0.0, later - earlier) for (_, earlier), (_, later) in pairwise(seen))
    return risen, seen[-1][0] - seen[0][0]


def under_load(gpu: Gpu) -> bool:
    return (gpu.get(Signal.UTIL_PERCENT) or 0.0) >= UNDER_LOAD_PERCENT
