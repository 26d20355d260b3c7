"""Waiting for a gateway that is briefly down."""

from __future__ import annotations

import pytest

from turngate.harnesses import patient
from turngate.harnesses.errors import Fault
from turngate.harnesses.patient import PatientGateway
from turngate.proxy import wire
from turngate.proxy.client import GatewayError

CREATED = wire.RolloutCreated(id="r", base_url="http://x/v1", api_key="k", policy="p", version=0)


class FlakyClient:
    """Fails with the given statuses, one a call, then answers."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)

    def create_rollout(self, new: wire.NewRollout) -> wire.RolloutCreated:
        """The next failure, or an answer."""
        if self.statuses:
            raise GatewayError(self.statuses.pop(0), "not now")
        return CREATED


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient, "FIRST_PAUSE_S", 0.001)


async def test_a_gateway_that_comes_back_is_waited_for() -> None:
    client = FlakyClient(0, 503, 502, 0)
    assert await PatientGateway(client, 60.0).create(wire.NewRollout(task="t")) == CREATED  # type: ignore[arg-type]
    assert client.statuses == []


async def test_patience_ends() -> None:
    with pytest.raises(Fault) as fault:
        await PatientGateway(FlakyClient(*[0] * 1000), 0.05).create(wire.NewRollout(task="t"))  # type: ignore[arg-type]
    assert fault.value.cause == "gateway_unavailable"


@pytest.mark.parametrize("status", [400, 401, 409, 410, 500])
async def test_a_refusal_is_final(status: int) -> None:
    client = FlakyClient(status, 0)
    with pytest.raises(Fault) as fault:
        await PatientGateway(client, 60.0).create(wire.NewRollout(task="t"))  # type: ignore[arg-type]
    assert fault.value.cause == "gateway_refused"
    assert str(status) in fault.value.detail
    assert client.statuses == [0]
