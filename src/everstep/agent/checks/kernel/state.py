"""Counts of the kernel's own accidents: /sys/kernel/oops_count and /proc/sys/kernel/tainted.

Every user may read them, so a crash inside the kernel is seen without its log.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from everstep.agent.checks.check import Check, Here, History, Limits, Source
from everstep.agent.checks.kernel.kmsg import boot_id
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Value

OOPS_COUNT = "/sys/kernel/oops_count"
TAINTED = "/proc/sys/kernel/tainted"
TAINTS = {
    4: ("a machine check", Verdict.SUSPECT),
    7: ("a crash inside the kernel", Verdict.SUSPECT),
    14: ("a soft lockup", Verdict.SUSPECT),
}
"""Bits of `tainted` that tell of an accident: Documentation/admin-guide/tainted-kernels.rst."""


class KernelState(Value, frozen=True, kw_only=True):
    """One look."""

    boot_id: str
    oopses: int | None
    """None: a kernel before 6.2 does not count them."""
    tainted: int


class KernelStateSource(Source[KernelState]):
    """Both files."""

    name = "kernel_state"
    kind = KernelState
    every_s = 5.0

    def absent(self, here: Here) -> str:
        return "" if here.path(TAINTED).exists() else f"there is no {TAINTED} here"

    def sample(self, here: Here) -> KernelState:
        oopses = here.path(OOPS_COUNT)
        return KernelState(
            boot_id=here.boot_id or boot_id(Path(here.root)),
            oopses=int(oopses.read_text()) if oopses.exists() else None,
            tainted=int(here.path(TAINTED).read_text()),
        )


class KernelStateCheck(Check[KernelState, Limits]):
    """Accidents since this machine came to the job."""

    name = "kernel.state"
    source = "kernel_state"
    about = f"crashes inside the kernel since the job began: {OOPS_COUNT}, {TAINTED}"

    def judge(self, here: Here, history: History[KernelState]) -> Iterable[Result]:
        del here
        first, now = history.first.sample, history.now.sample
        what = [
            (name, verdict)
            for bit, (name, verdict) in TAINTS.items()
            if now.tainted >> bit & 1 and not first.tainted >> bit & 1
        ]
        new = (now.oopses or 0) - (first.oopses or 0)
        if first.oopses is not None and new > 0:
            what.append((f"{new} crashes in all", Verdict.SUSPECT))
        if not what:
            return [self.passed(f"{now.oopses or 0} crashes since boot, tainted {now.tainted}")]
        return [
            self.found(
                what[0][1],
                Category.OS_KERNEL_PANIC,
                "the kernel tells of " + " and ".join(name for name, _ in what),
                "Read the kernel log; reboot the machine at the next stop, then test it.",
                cause=f"boot {now.boot_id}",
                values={"oopses": float(now.oopses or 0)},
            )
        ]
