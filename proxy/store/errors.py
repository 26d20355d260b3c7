"""The store's exception tree: every way in which keeping or finding something can fail.

One tree, so that the gateway can map it to HTTP statuses in one place. Messages never contain secrets.
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of all store errors."""


class StoreMissing(StoreError):
    """There is no store (or no such file of one) at the path given."""


class StoreBusy(StoreError):
    """Another process owns this file for writing."""


class StoreFull(StoreError):
    """The disk (or quota) is full; what was asked has not been written."""


class StoreClosed(StoreError):
    """The store or its writer is closed."""


class StoreDamaged(StoreError):
    """A file is not readable as what it should be."""


class SchemaTooNew(StoreError):
    """The file was written by a later release of turngate."""


class SchemaTooOld(StoreError):
    """The file needs a migration, which a read-only opening may not do."""


class NotFound(StoreError):
    """No such rollout, group, lease, turn or adapter."""


class Conflict(StoreError):
    """What was asked contradicts what is recorded."""


class Invalid(StoreError):
    """What was asked can never be right: a missing or impossible value."""


class StaleLease(Conflict):
    """The lease expired and its groups were given to another, or training was resumed since."""
