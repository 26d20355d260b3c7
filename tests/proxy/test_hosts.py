"""Which Host headers are answered: addresses and localhost always, other names only when given."""

from __future__ import annotations

import pytest

from turngate.proxy.hosts import allowed_names, is_allowed


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8400", "127.0.0.1", "127.0.0.1:1", "[::1]:8400", "10.1.2.3:80", "", "gate.example:443"],
)
def test_addresses_localhost_and_given_names_are_answered(host: str) -> None:
    assert is_allowed(host, allowed_names(["Gate.example."]))


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:127", "notlocalhost"),
        *("127.0.0.1@evil.example", "[evil.example]", "[", "localhost evil.example", "0x7f.1"),
    ],
)
def test_other_names_are_not(host: str) -> None:
    assert not is_allowed(host, allowed_names(["gate.example"]))


def test_the_name_in_the_public_url_is_answered_and_a_star_means_all() -> None:
    assert is_allowed("gate.example:8400", allowed_names([], "https://Gate.Example:9/x", None))
    assert is_allowed("any.example", allowed_names(["*"]))
