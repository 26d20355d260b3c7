"""Sampling keys the gateway would refuse are errors of the settings, before anything starts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from turngate.harnesses.settings import RunSettings
from turngate.proxy import sampling, wire


def test_a_misspelt_sampling_key_is_named_with_the_nearest_one() -> None:
    with pytest.raises(ValidationError, match=r"temp is no sampling setting; did you mean temperature\?"):
        RunSettings(sampling={"temp": 1})


def test_a_key_near_to_none_lists_what_there_is() -> None:
    with pytest.raises(ValidationError, match="zzzz is no sampling setting; use one of temperature, top_p"):
        RunSettings(sampling={"zzzz": 1})


def test_the_settings_take_every_key_the_gateway_checks() -> None:
    assert set(sampling.NUMBERS) | set(sampling.WHOLE) <= set(wire.SAMPLING_KEYS)
    assert set(RunSettings(sampling=dict.fromkeys(sampling.POLICY_KEYS)).sampling) == sampling.POLICY_KEYS
