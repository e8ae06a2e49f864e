"""What several trackers have in common: services with an API key, and names of files."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from accmt.tracking.history import RunPlace
from accmt.tracking.spec import TrackerSpec

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

    def missing_key(self, kwargs: Mapping[str, Any]) -> str | None:
        return None if self.is_offline_wanted(kwargs) or self.has_key(kwargs) else self.key_advice


def clean_path(name: str) -> str:
    """Convert a name to a normalized relative path that cannot leave its folder."""
    return posixpath.normpath(posixpath.join("/", name)).strip("/") or "_"


def clean_file_name(name: str) -> str:
    """Convert the name of a file or folder to a valid artifact name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:128]
