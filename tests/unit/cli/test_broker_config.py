"""Tests of `neve broker config`."""

from __future__ import annotations

from neve.cli.broker import latest_rate, without_secrets


def test_secrets_in_the_configuration_of_apache_brokers_are_hidden() -> None:
    told = {
        "innerClientAuthenticationCredentials": '{"accessKey":"a","secretKey":"hush"}',
        "initAuthenticationUser": '{"username":"a","password":"hush"}',
        "brokerName": "broker-a",
        "somePassword": "",
        "authenticationEnabled": "true",
    }
    found = without_secrets(told)
    assert found.keys() == told.keys()
    assert "hush" not in str(found)
    assert {key: found[key] for key in ("brokerName", "somePassword", "authenticationEnabled")} == {
        "brokerName": "broker-a",
        "somePassword": "",
        "authenticationEnabled": "true",
    }


def test_broker_without_rates_is_described() -> None:
    # an Apache broker reports a space in its first seconds
    assert [latest_rate(rates) for rates in (None, "", " ", "12.34 5.0 6.0")] == [None, None, None, 12.3]
