"""Leased groups with their rows: what a trainer gets. Rows are built here, digested, and only then handed out."""

from __future__ import annotations

import logging

from turngate.proxy import wire
from turngate.proxy.control import Control
from turngate.proxy.rows import Row, build_rows
from turngate.proxy.store.errors import StoreDamaged
from turngate.proxy.store.records import RolloutRecord
from turngate.proxy.turns import BrokenTree

log = logging.getLogger("turngate.leasing")


def lease_groups(control: Control, new: wire.NewLease) -> wire.Lease:
    """Take finished groups and build their rows. Runs in a thread: packing is CPU work, not the event loop's."""
    grant = control.store.lease(new, control.utc_ns())
    groups: list[wire.LeasedGroup] = []
    for name in grant.groups:
        records = control.store.group_rollouts(name)
        rows = {record.id: _rows(control, record) for record in records}
        control.store.record_served([row for some in rows.values() for row in some or ()])
        leased = [_leased(record, rows[record.id]) for record in records]
        groups.append(wire.LeasedGroup(id=name, task=control.store.group(name).task, rollouts=leased))
    return wire.Lease(lease=grant.id, epoch=grant.epoch, groups=groups)


def _rows(control: Control, record: RolloutRecord) -> list[Row] | None:
    """The rollout's rows; None where its turns cannot be read: that must not stop the leasing of all others."""
    if record.outcome != "scored":
        return []
    try:
        return build_rows(control.turns.turns(record), record.new.trained_labels)
    except (BrokenTree, StoreDamaged) as error:
        log.error("rows_damaged", extra={"rollout": record.id, "error": str(error)})
        return None


def _leased(record: RolloutRecord, rows: list[Row] | None) -> wire.LeasedRollout:
    damaged = rows is None
    return wire.LeasedRollout(
        id=record.id,
        outcome="unscorable" if damaged else record.outcome or "unscorable",
        cause="store_damaged" if damaged else record.cause,
        reward=None if damaged else record.reward,
        rewards=dict(record.rewards),
        version=record.version,
        rows=[wire.WireRow.pack(row) for row in rows or ()],
    )
