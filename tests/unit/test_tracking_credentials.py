import pytest

from accmt.errors import TrackerError
from accmt.tracking.credentials import tell_of_missing_key, without_secrets
from accmt.tracking.run_folder import RunPlace
from accmt.tracking.spec import TrackerSpec


class Keyless(TrackerSpec):
    name = "keyless"

    def missing_key(self, kwargs):
        return None if "key" in kwargs else "set THE_KEY"

    def upload_command(self, place):
        return f"upload {place.run_folder}"


PLACE = RunPlace("logs", "track", "run")


def test_a_missing_key_is_one_line_that_says_how_to_upload_later(caplog):
    caplog.set_level("INFO", logger="accmt")
    tell_of_missing_key(Keyless(), PLACE, {}, is_needed=False)
    (line,) = caplog.messages
    assert line.endswith("has no key (set THE_KEY) and writes files; upload them by `upload logs/track/run`")


def test_a_missing_key_is_an_error_where_the_service_must_be_reached():
    with pytest.raises(TrackerError, match="the tracker keyless\\s+got: no key[\\s\\S]*do: set THE_KEY, or"):
        tell_of_missing_key(Keyless(), PLACE, {}, is_needed=True)


def test_nothing_is_said_where_nothing_is_missing(caplog):
    caplog.set_level("INFO", logger="accmt")
    tell_of_missing_key(Keyless(), PLACE, {"key": "x"}, is_needed=True)
    tell_of_missing_key(TrackerSpec(), PLACE, {}, is_needed=True)
    assert caplog.messages == []


def test_secrets_are_not_written_down():
    given = {"api_key": "x", "token": "x", "write_token": "x", "experiment_key": "kept", "tags": ["kept"]}
    assert without_secrets(given) == {"experiment_key": "kept", "tags": ["kept"]}
