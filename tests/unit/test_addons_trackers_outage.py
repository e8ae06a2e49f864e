import logging

import pytest
import requests

from accmt.addons.trackers import spec
from accmt.addons.trackers.spec import Outage, is_outage


def chained(cause):
    try:
        try:
            raise cause
        except Exception:  # noqa: BLE001
            raise RuntimeError("the request failed")  # noqa: B904
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(),
        TimeoutError(),
        requests.ConnectionError(),
        requests.Timeout(),
        chained(requests.ConnectionError()),
        OSError(5, "input/output error"),
    ],
)
def test_errors_of_connections_are_outages(error):
    assert is_outage(error)


@pytest.mark.parametrize(
    "error",
    [
        None,
        ValueError(),
        RuntimeError(),
        FileNotFoundError(),
        PermissionError(),
        requests.exceptions.InvalidURL(),
        requests.exceptions.MissingSchema(),
        chained(KeyError("x")),
    ],
)
def test_mistakes_are_no_outages(error):
    assert not is_outage(error)


def test_delays_double_up_to_half_a_second_and_are_longer_in_a_long_outage(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(spec.time, "monotonic", lambda: now)
    one = Outage("mlflow", "history.jsonl")
    assert [one.count(ConnectionError()) for _ in range(6)] == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5]
    now += 61
    assert [one.count(ConnectionError()) for _ in range(3)] == [3.2, 5.0, 5.0]
    one.end()
    assert one.count(ConnectionError()) == 0.05


def test_an_outage_is_told_once_and_its_end_once(caplog):
    caplog.set_level(logging.INFO, logger="accmt")
    one = Outage("mlflow", "history.jsonl")
    for _ in range(9):
        one.count(ConnectionError("refused"))
    one.end()
    one.end()
    warning, end = caplog.messages
    assert "ConnectionError: refused" in warning
    assert "rows wait in history.jsonl" in warning
    assert "the tracker mlflow accepts rows again" in end
