"""Whether NVIDIA's DCGM service runs where it is set up to: others rely on what it collects.

Reads the process table and systemd's files; asks nobody, so nothing can hang.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.agent.checks.check import Check, Here, History, Limits, Source
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Value

ENGINE = "nv-hostengine"
UNITS = ("nvidia-dcgm.service", "dcgm.service")
WANTED = "/etc/systemd/system/multi-user.target.wants"
INSTALLED = ("/usr/bin/nv-hostengine", "/usr/lib/systemd/system/nvidia-dcgm.service")
SYSTEMD_RUNS = "/run/systemd/system"


class DcgmSample(Value, frozen=True, kw_only=True):
    """What is to be seen of DCGM."""

    enabled: bool = False
    """systemd starts it on this machine."""
    running: bool = False


class DcgmSource(Source[DcgmSample]):
    """A look at /proc and at systemd's links."""

    name = "dcgm"
    kind = DcgmSample
    every_s = 60.0

    def absent(self, here: Here) -> str:
        if any(here.path(path).exists() for path in INSTALLED):
            return ""
        return "DCGM is not installed"

    def sample(self, here: Here) -> DcgmSample:
        runs = here.path(SYSTEMD_RUNS).is_dir()
        enabled = runs and any(here.path(f"{WANTED}/{unit}").is_symlink() for unit in UNITS)
        return DcgmSample(enabled=enabled, running=_runs(here))


def _runs(here: Here) -> bool:
    for process in here.path("/proc").iterdir():
        if process.name.isdigit():
            try:
                name = (process / "comm").read_text("utf-8", "replace").strip()
            except OSError:  # it has ended meanwhile
                continue
            if name == ENGINE:
                return True
    return False


class Dcgm(Check[DcgmSample, Limits]):
    """Set up, or seen running before, and not running."""

    name = "gpu.dcgm"
    source = "dcgm"
    about = "the DCGM service runs where it is set up (process table, systemd)"
    keep = 12

    def judge(self, here: Here, history: History[DcgmSample]) -> Iterable[Result]:
        del here
        now = history.now.sample
        ran = history.first.sample.running or any(each.sample.running for each in history.past)
        if now.running:
            yield self.passed("DCGM runs")
        elif not now.enabled and not ran:
            yield self.passed("DCGM is installed and not set up to run")
        else:
            why = "DCGM is set up to run and does not" if now.enabled else "DCGM no longer runs"
            do = "Look at `systemctl status nvidia-dcgm`."
            yield self.found(Verdict.WARN, Category.NONE, why, do)
