"""The gateway's status as test doubles give it: what a test is about, and nothing else going on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turngate.proxy import wire


def status(groups: Mapping[str, int], *, policies: Sequence[wire.PolicyInfo] = (), finished: int = 0) -> wire.Status:
    """A status with these groups by state."""
    return wire.Status(
        run="test",
        open_rollouts=0,
        finished_rollouts=finished,
        scored_rollouts=0,
        unscorable={},
        turns=0,
        spliced=0,
        breaks={},
        generated_tokens=0,
        groups=dict(groups),
        reward_mean_last=None,
        policies=list(policies),
    )
