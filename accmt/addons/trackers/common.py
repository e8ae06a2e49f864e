"""What several trackers have in common: services with an API key, and names of files."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from accmt.addons.trackers.spec import TrackerSpec
from accmt.errors import TrackerError, fail
from accmt.messages import say
from accmt.tracking.history import RunPlace

STATUS = "accmt.status"
"""The tag or field for accmt's run status in a tracker."""


class ServiceSpec(TrackerSpec):
    """A tracker that needs an API key, and has an offline mode in which it only writes files."""

    key_advice: ClassVar[str]
    is_exclusive = True

    def has_key(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the API key is known, without prompting for it."""
        raise NotImplementedError

    def is_offline_wanted(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the user set the tracker to offline mode."""
        raise NotImplementedError

    def is_offline(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the run is written to files instead of the service."""
        return self.is_offline_wanted(kwargs) or not self.has_key(kwargs)

    def is_remote(self, place: RunPlace, kwargs: Mapping[str, Any]) -> bool:
        return not self.is_offline(kwargs)

    def upload_command(self, place: RunPlace) -> str:
        """Return the command that uploads the files of a run without an API key."""
        raise NotImplementedError

    def require_access(self, place: RunPlace, kwargs: Mapping[str, Any], *, is_needed: bool) -> None:
        """Log that a tracker without an API key writes files, and how to upload them later.

        accmt never prompts for a key: a run that waits for input does not train.
        """
        if self.is_offline_wanted(kwargs) or self.has_key(kwargs):
            return
        how = self.key_advice
        if is_needed:
            where, do = f"the tracker {self.name}", f'{how}, or tracker_options={{"offline": "auto"}}'
            expected = 'an API key, because of tracker_options={"offline": False}'
            raise fail(TrackerError, where, got="no API key", expected=expected, do=do)
        command = self.upload_command(place)
        say(f"the tracker {self.name} has no API key ({how}) and writes files; upload them with `{command}`")


def clean_path(name: str) -> str:
    """Convert a name to a normalized relative path that cannot leave its folder."""
    return posixpath.normpath(posixpath.join("/", name)).strip("/") or "_"


def clean_file_name(name: str) -> str:
    """Convert the name of a file or folder to a valid artifact name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:128]
