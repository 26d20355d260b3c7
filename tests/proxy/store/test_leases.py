"""Leases: whole groups, one holder at a time, and one fate in the lineage of the last checkpoint.

The state machine is compared, step by step, with a model that is too simple to be wrong.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from turngate.proxy import wire
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.errors import Conflict, NotFound, StaleLease

SECOND_NS = 10**9
TTL_S = 10


def add_group(control: ControlStore, name: str, now_ns: int = 1, policy: str = "policy") -> None:
    """A ready group of two scored rollouts."""
    for number in range(2):
        rollout = f"{name}-{number}"
        new = wire.NewRollout(task="task", group=name, group_size=2)
        control.create_rollout(rollout, rollout.encode(), new, policy, 0, now_ns)
        control.finish_rollout(rollout, wire.FinishRollout(reward=float(number)), now_ns)


def ack(epoch: int, step: int, *groups: str, fate: wire.GroupFate = "trained") -> wire.AckLease:
    return wire.AckLease(epoch=epoch, step=step, groups=[wire.GroupAck(group=group, fate=fate) for group in groups])


@pytest.fixture
def control(tmp_path: Path) -> ControlStore:
    store = ControlStore(tmp_path / "control.sqlite")
    for number in range(3):
        add_group(store, f"g{number}", now_ns=10 - number)
    return store


NEW = wire.NewLease(policy="policy", max_groups=2, ttl_s=TTL_S)


def test_the_oldest_ready_groups_are_leased_whole_and_once(control: ControlStore) -> None:
    first, second, third = (control.lease(NEW, 20) for _ in range(3))
    assert first.groups == ("g2", "g1")
    assert second.groups == ("g0",)
    assert third == ("", 0, ())
    assert second.epoch > first.epoch
    assert control.lease(wire.NewLease(policy="other"), 20).groups == ()


def test_an_expired_lease_goes_to_the_next_and_its_holder_is_told(control: ControlStore) -> None:
    lost = control.lease(NEW, 0)
    taken = control.lease(NEW, TTL_S * SECOND_NS)
    assert taken.groups == lost.groups
    assert taken.epoch > lost.epoch
    with pytest.raises(StaleLease):
        control.ack(lost.id, ack(lost.epoch, 1, "g2"), 1)
    with pytest.raises(StaleLease):
        control.heartbeat(lost.id, wire.Heartbeat(epoch=lost.epoch), 1)
    control.ack(taken.id, ack(taken.epoch, 1, *taken.groups), 1)


def test_an_expired_lease_that_nobody_took_still_counts(control: ControlStore) -> None:
    grant = control.lease(NEW, 0)
    control.ack(grant.id, ack(grant.epoch, 1, "g2"), 99 * SECOND_NS)
    control.heartbeat(grant.id, wire.Heartbeat(epoch=grant.epoch, ttl_s=TTL_S), 99 * SECOND_NS)
    assert control.lease(NEW, 100 * SECOND_NS).groups == ("g0",)


def test_a_heartbeat_keeps_a_lease(control: ControlStore) -> None:
    grant = control.lease(NEW, 0)
    control.heartbeat(grant.id, wire.Heartbeat(epoch=grant.epoch, ttl_s=TTL_S), 9 * SECOND_NS)
    assert control.lease(NEW, 15 * SECOND_NS).groups == ("g0",)


def test_an_ack_repeated_changes_nothing_and_a_different_one_is_refused(control: ControlStore) -> None:
    grant = control.lease(NEW, 0)
    told = ack(grant.epoch, 4, *grant.groups)
    control.ack(grant.id, told, 1)
    control.ack(grant.id, told, 2)
    assert control.fates("policy") == {"g2": ("trained", 4), "g1": ("trained", 4)}
    for other in (ack(grant.epoch, 5, "g2"), ack(grant.epoch, 4, "g2", fate="dropped"), ack(grant.epoch, 4, "g0")):
        with pytest.raises(Conflict):
            control.ack(grant.id, other, 3)
    with pytest.raises(StaleLease):
        control.ack(grant.id, ack(grant.epoch + 1, 4, "g2"), 3)
    with pytest.raises(NotFound):
        control.ack("nothing", told, 3)


def test_an_ack_is_whole_or_not_at_all(control: ControlStore) -> None:
    grant = control.lease(NEW, 0)
    with pytest.raises(Conflict):
        control.ack(grant.id, ack(grant.epoch, 1, "g2", "g0"), 1)
    assert control.fates("policy") == {}


def test_resume_gives_back_what_came_after_the_checkpoint(control: ControlStore) -> None:
    first, second = control.lease(NEW, 0), control.lease(NEW, 0)
    control.ack(first.id, ack(first.epoch, 1, "g2"), 1)
    control.durable("policy", 1, "/checkpoints/1", 2)
    control.ack(first.id, ack(first.epoch, 2, "g1", fate="zero_variance"), 3)
    assert control.last_durable("policy") == (1, "/checkpoints/1")
    assert control.resume("policy", 1, 4) == 2
    assert control.fates("policy") == {"g2": ("trained", 1)}
    for zombie in (first, second):
        with pytest.raises(StaleLease):
            control.ack(zombie.id, ack(zombie.epoch, 2, *zombie.groups), 5)
    assert control.lease(NEW, 6).groups == ("g1", "g0")
    assert control.resume("policy", 1, 7) == 2


def test_resume_from_an_older_checkpoint_abandons_the_newer_ones(control: ControlStore) -> None:
    grant = control.lease(NEW, 0)
    for step, group in ((1, "g2"), (2, "g1")):
        control.ack(grant.id, ack(grant.epoch, step, group), step)
        control.durable("policy", step, f"/checkpoints/{step}", step)
    assert control.resume("policy", 1, 9) == 1
    assert control.last_durable("policy") == (1, "/checkpoints/1")


def test_the_end_of_training_drops_what_has_no_fate_and_revokes_its_leases(control: ControlStore) -> None:
    first, second = control.lease(NEW, 0), control.lease(NEW, 0)
    control.ack(first.id, ack(first.epoch, 1, "g2"), 1)
    control.create_rollout("late", b"late", wire.NewRollout(task="task", group="g3", group_size=2), "policy", 0, 2)
    add_group(control, "other", policy="second")
    assert control.close_groups("policy", "run_ended") == 3
    ends = {one.id: (one.state, one.step, one.cause, one.acks) for one in control.outcomes("policy")}
    dropped = ("dropped", None, "run_ended", 0)
    assert ends == {"g2": ("trained", 1, None, 1), "g1": dropped, "g0": dropped, "g3": dropped}
    with pytest.raises(StaleLease):
        control.ack(second.id, ack(second.epoch, 2, "g0"), 3)
    control.finish_rollout("late", wire.FinishRollout(reward=1.0), 4)
    assert control.close_groups("policy", "run_ended") == 0
    assert control.group("other").state == "ready"
    assert control.group_policies() == ["policy", "second"]


def test_one_policys_resume_leaves_another_alone(control: ControlStore) -> None:
    add_group(control, "other", policy="second")
    grant = control.lease(wire.NewLease(policy="second"), 0)
    control.resume("policy", 0, 1)
    control.ack(grant.id, ack(grant.epoch, 9, "other"), 2)


class LeaseMachine(RuleBasedStateMachine):
    """Trainers that lease, stall, acknowledge, save, crash and resume, in any order."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.control = ControlStore(Path(self.folder.name) / "control.sqlite")
        self.now_ns = 0
        self.groups: list[str] = []  # in order of readiness
        self.holder: dict[str, str] = {}  # group -> lease id, while leased
        self.expires: dict[str, int] = {}  # lease id -> when; absent once revoked
        self.fate: dict[str, tuple[str, int]] = {}

    def teardown(self) -> None:
        self.control.close()
        self.folder.cleanup()

    @rule()
    def group_becomes_ready(self) -> None:
        self.now_ns += 1
        self.groups.append(f"g{len(self.groups)}")
        add_group(self.control, self.groups[-1], self.now_ns)

    @rule(seconds=st.integers(1, 12))
    def time_passes(self, seconds: int) -> None:
        self.now_ns += seconds * SECOND_NS

    @rule(target=leases, most=st.integers(1, 3))
    def lease(self, most: int) -> object:
        free = [g for g in self.groups if g not in self.fate and self._is_free(g)][:most]
        grant = self.control.lease(wire.NewLease(policy="policy", max_groups=most, ttl_s=TTL_S), self.now_ns)
        assert list(grant.groups) == free
        if not free:
            return multiple()
        for revoked in {self.holder[g] for g in free if g in self.holder}:
            self._revoke(revoked)
        self.expires[grant.id] = self.now_ns + TTL_S * SECOND_NS
        self.holder |= dict.fromkeys(free, grant.id)
        return grant

    @rule(grant=leases, step=st.integers(0, 5), fate=st.sampled_from(["trained", "zero_variance", "dropped"]))
    def acknowledge(self, grant: object, step: int, fate: wire.GroupFate) -> None:
        lease, epoch, groups = grant  # type: ignore[misc]
        if lease not in self.expires:
            with pytest.raises(StaleLease):
                self.control.ack(lease, ack(epoch, step, *groups, fate=fate), self.now_ns)
            return
        told = [g for g in groups if self.holder.get(g) == lease]
        if any(g in self.fate for g in told):
            return
        self.control.ack(lease, ack(epoch, step, *told, fate=fate), self.now_ns)
        self.fate |= dict.fromkeys(told, (fate, step))

    @rule(grant=leases)
    def beat(self, grant: object) -> None:
        lease, epoch, _ = grant  # type: ignore[misc]
        if lease in self.expires:
            self.control.heartbeat(lease, wire.Heartbeat(epoch=epoch, ttl_s=TTL_S), self.now_ns)
            self.expires[lease] = self.now_ns + TTL_S * SECOND_NS
        else:
            with pytest.raises(StaleLease):
                self.control.heartbeat(lease, wire.Heartbeat(epoch=epoch, ttl_s=TTL_S), self.now_ns)

    @rule(step=st.integers(0, 5))
    def resume(self, step: int) -> None:
        returned = [g for g, lease in self.holder.items() if g not in self.fate or self.fate[g][1] > step]
        assert self.control.resume("policy", step, self.now_ns) == len(returned)
        self.fate = {g: fate for g, fate in self.fate.items() if fate[1] <= step}
        self.holder = {g: lease for g, lease in self.holder.items() if g in self.fate}
        self.expires.clear()

    @rule()
    def gateway_restarts(self) -> None:
        self.control.close()
        self.control = ControlStore(Path(self.folder.name) / "control.sqlite")

    @invariant()
    def each_group_has_at_most_one_fate_and_none_is_lost(self) -> None:
        assert self.control.fates("policy") == self.fate
        states = self.control.group_states()
        assert sum(states.values()) == len(self.groups)
        assert states["leased"] == sum(g not in self.fate for g in self.holder)

    def _is_free(self, group: str) -> bool:
        lease = self.holder.get(group)
        return lease is None or self.expires.get(lease, 0) <= self.now_ns

    def _revoke(self, lease: str) -> None:
        del self.expires[lease]
        self.holder = {g: held for g, held in self.holder.items() if held != lease or g in self.fate}


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
