"""The trainer's exceptions: one small tree, so that callers can tell a usage error from a lost gateway.

Every message says what was wrong, where, and what to do. Nothing here may be raised for a fault of one rollout: those
are counted, not thrown.
"""

from __future__ import annotations


class TrainerError(Exception):
    """Base of everything `turngate.trainer` raises on purpose."""


class SettingsError(TrainerError):
    """A setting is missing, unknown or impossible."""


class NoStore(TrainerError):
    """What was named is no store, or the expression over it is none: wrong usage."""


class GatewayLost(TrainerError):
    """The gateway gave no answer for longer than `gateway_patience_s`."""


class EngineLost(GatewayLost):
    """The gateway answers, but had no engine for longer than `gateway_patience_s`."""


class PublishFailed(TrainerError):
    """The gateway could not make an adapter version live on every replica."""


class NotFinite(TrainerError):
    """Weights or gradients hold NaN or an infinity. `cause` is why the groups of a step passed over are dropped."""

    cause = "gradient not finite"


class NeverFinite(NotFinite):
    """Several steps in a row had such gradients: started again as it is, training would go on to learn nothing."""


class CheckpointTorn(TrainerError):
    """A checkpoint folder is incomplete or differs from its marker."""


class AttentionUnavailable(TrainerError):
    """No tree attention works for this model on this device."""


class SeamBroken(TrainerError):
    """The installed TRL is not the version the seam was written for."""
