"""The control store's tables: run facts, rollouts, groups, leases, acknowledgements, checkpoints, adapters.

Migrations are only ever appended; each leads from one schema version to the next. Times are UTC ns.
"""

from __future__ import annotations

MIGRATIONS = (
    """
    CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE rollouts (
        id TEXT PRIMARY KEY, secret BLOB NOT NULL UNIQUE, task TEXT NOT NULL, grp TEXT, harness TEXT NOT NULL,
        policy TEXT NOT NULL, version INTEGER NOT NULL, training INTEGER NOT NULL, new TEXT NOT NULL,
        state TEXT NOT NULL DEFAULT 'open', outcome TEXT, cause TEXT, reward REAL, rewards TEXT NOT NULL DEFAULT '{}',
        metrics TEXT NOT NULL DEFAULT '{}', created_at_ns INTEGER NOT NULL, finished_at_ns INTEGER,
        member INTEGER NOT NULL DEFAULT 0, sealed_turns INTEGER, seal BLOB
    );
    CREATE INDEX rollouts_by_group ON rollouts (grp);
    CREATE INDEX rollouts_by_state ON rollouts (state, policy, version);
    CREATE INDEX rollouts_by_finish ON rollouts (outcome, finished_at_ns);
    CREATE TABLE groups (
        id TEXT PRIMARY KEY, task TEXT NOT NULL, policy TEXT NOT NULL, size INTEGER NOT NULL, deadline_ns INTEGER,
        created_at_ns INTEGER NOT NULL, ready_at_ns INTEGER, state TEXT NOT NULL DEFAULT 'open', cause TEXT,
        lease TEXT, step INTEGER
    );
    CREATE INDEX groups_by_state ON groups (state, policy, ready_at_ns);
    CREATE TABLE leases (
        id TEXT PRIMARY KEY, policy TEXT NOT NULL, epoch INTEGER NOT NULL UNIQUE, expires_at_ns INTEGER NOT NULL,
        created_at_ns INTEGER NOT NULL, revoked TEXT
    );
    CREATE TABLE acks (
        grp TEXT NOT NULL, lease TEXT NOT NULL, epoch INTEGER NOT NULL, step INTEGER NOT NULL, fate TEXT NOT NULL,
        cause TEXT, rows TEXT NOT NULL, acked_at_ns INTEGER NOT NULL, durable INTEGER NOT NULL DEFAULT 0,
        undone_at_ns INTEGER
    );
    CREATE INDEX acks_by_group ON acks (grp);
    CREATE TABLE checkpoints (
        policy TEXT NOT NULL, step INTEGER NOT NULL, path TEXT NOT NULL, made_at_ns INTEGER NOT NULL,
        abandoned_at_ns INTEGER
    );
    CREATE TABLE adapters (
        policy TEXT NOT NULL, version INTEGER NOT NULL, name TEXT NOT NULL UNIQUE, path TEXT NOT NULL,
        step INTEGER NOT NULL, state TEXT NOT NULL, cause TEXT, published_at_ns INTEGER NOT NULL,
        PRIMARY KEY (policy, version)
    ) WITHOUT ROWID;
    CREATE TABLE served_rows (
        rollout TEXT NOT NULL, place INTEGER NOT NULL, digest BLOB NOT NULL, PRIMARY KEY (rollout, place, digest)
    ) WITHOUT ROWID
    """,
    # Over-sampled groups, and attempts that another one takes the place of.
    """
    ALTER TABLE groups ADD COLUMN attempts INTEGER;
    ALTER TABLE rollouts ADD COLUMN replaced INTEGER NOT NULL DEFAULT 0
    """,
    # Several gateway processes: whose turn file a rollout is in.
    """
    ALTER TABLE rollouts ADD COLUMN worker INTEGER NOT NULL DEFAULT 0;
    CREATE INDEX rollouts_by_worker ON rollouts (state, worker);
    CREATE INDEX adapters_by_state ON adapters (state)
    """,
)
