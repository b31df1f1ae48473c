"""For the ranks of one position: whose shards they get, and from where. Used by rules.py."""

from __future__ import annotations

from everstep.core.keeping import peer_at
from everstep.core.restore import Choice
from everstep.core.state import State
from everstep.model import NodeRank, Peer, Rank


def sources(state: State, choice: Choice, node_rank: NodeRank) -> tuple[Peer, ...]:
    """Where the ranks of this position fetch their shards, each once."""
    ours = state.job.ranks_of(node_rank)
    wanted = {choice.restores.get(rank, rank): name for rank, name in choice.fetch if rank in ours}
    return tuple(peer_at(state, rank, name) for rank, name in wanted.items())


def slices(state: State, choice: Choice, node_rank: NodeRank) -> tuple[Peer, ...]:
    """Where those that are parts find the slices that they are joined with."""
    joins = [choice.joins.get(Rank(rank), ()) for rank in state.job.ranks_of(node_rank)]
    sources = {rank: name for each in joins for rank, name in each}
    return tuple(peer_at(state, rank, name) for rank, name in sorted(sources.items()))


def restores(state: State, choice: Choice, node_rank: NodeRank) -> tuple[tuple[Rank, Rank], ...]:
    """Whose shards the ranks of this position get, if others' may be theirs."""
    ranks = map(Rank, state.job.ranks_of(node_rank))
    return tuple((rank, choice.restores[rank]) for rank in ranks if rank in choice.restores)
