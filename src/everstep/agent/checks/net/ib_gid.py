"""ib.gid: an address of an RDMA port that was there at the start is gone, or of another type."""

from __future__ import annotations

from collections.abc import Iterator

from everstep.agent.checks.check import Check, Here, History
from everstep.agent.checks.net.ignoring import PortLimits, ignored
from everstep.agent.checks.net.port_gids import Gids
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class GidCheck(Check[Gids, PortLimits]):
    """New connections then fail, mostly as retries that ran out at the first collective."""

    name = "ib.gid"
    source = "infiniband.gids"
    about = "GIDs of RDMA ports that are gone or changed their type since the start"
    limits_type = PortLimits
    again_s = 600.0

    def judge(self, here: Here, history: History[Gids]) -> Iterator[Result]:
        now, first = history.now.sample, history.first.sample
        for name, why in now.unread.items():
            yield self.could_not_run(f"{name}: {why}", name)
        for name, table in now.ports.items():
            if ignored(name, here, self.limits):
                continue
            lost = [
                f"{index} ({began or 'unknown type'}) is {_is(table.get(index))}"
                for index, began in first.ports.get(name, {}).items()
                if table.get(index) != began
            ]
            if not lost:
                yield self.passed(f"{name} has {len(table)} GIDs", name)
                continue
            yield self.found(
                Verdict.SUSPECT,
                Category.INFINIBAND_ERROR,
                f"{name}: GID {', '.join(lost)}",
                "See whether the interface of this port lost an address, and whether "
                "NCCL_IB_GID_INDEX still names the right entry (show_gids).",
                item=name,
            )


def _is(kind: str | None) -> str:
    return "empty now" if kind is None else f"of type {kind or 'unknown'} now"
