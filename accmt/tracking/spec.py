"""What accmt asks of a tracker: the base of every file in `trackers/`, and the answers for a user's own tracker."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from textwrap import shorten
from typing import TYPE_CHECKING, Any, ClassVar, Self

from accmt.errors import explain
from accmt.messages import say, warn
from accmt.secrets import remember
from accmt.tracking.history import RunPlace
from accmt.tracking.media import Kind, Media
from accmt.tracking.replay import Resume, Rewinding, Row

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


# ---- A tracker that does not answer: how long to wait before the next try, and the one warning.


_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 0.5
_LONG_OUTAGE_S = 60.0
_LONG_OUTAGE_DELAY_S = 5.0
_TRIES_BEFORE_WARNING = 3


class Outage:
    """The failures of one tracker since it last took something."""

    def __init__(self, tracker: str, where_rows_wait: str) -> None:
        self._tracker = tracker
        self._where_rows_wait = where_rows_wait
        self._began = 0.0
        self.num_failures = 0
        self.error: BaseException | None = None

    def count(self, error: BaseException) -> float:
        """Count one failure; the third in a row is worth a warning.

        Returns:
            The seconds to wait before the next try.
        """
        self._add(error, 1)
        if self.num_failures == _TRIES_BEFORE_WARNING:
            self._warn()
        longest = _LONGEST_DELAY_S if time.monotonic() - self._began < _LONG_OUTAGE_S else _LONG_OUTAGE_DELAY_S
        return float(min(_FIRST_DELAY_S * 2 ** min(self.num_failures - 1, 10), longest))

    def announce(self, error: BaseException) -> None:
        """Count a failure that is worth the warning at once."""
        self._add(error, _TRIES_BEFORE_WARNING)
        self._warn()

    def end(self) -> None:
        """Forget the failures, and say so where they had been worth a warning."""
        if self.num_failures >= _TRIES_BEFORE_WARNING:
            seconds = time.monotonic() - self._began
            say(f"the tracker {self._tracker} accepts rows again after {seconds:.1f} s, and gets those that waited")
        self.num_failures = 0
        self.error = None

    def _add(self, error: BaseException, count: int) -> None:
        self._began = self._began if self.num_failures else time.monotonic()
        self.num_failures += count
        self.error = error

    def _warn(self) -> None:
        expected = f"a tracker that accepts rows; training continues, and they wait in {self._where_rows_wait}"
        do = "nothing: they are delivered as soon as it does"
        warn(explain(f"the tracker {self._tracker}", name_error(self.error), expected, do))


def is_outage(error: BaseException | None) -> bool:
    """Return whether an error, or one that it came from, is a connection's or a time-out's, not a mistake's."""
    return any(isinstance(cause, OSError) and not isinstance(cause, _MISTAKES) for cause in _causes(error))


def name_error(error: BaseException | None) -> str:
    """Return an error as messages show it: the libraries' own for a dead server fill half a screen."""
    return "no answer" if error is None else shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")


# A ValueError too: the request libraries' errors for malformed URLs are both.
_MISTAKES = (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


STATUS = "accmt.status"
"""Where a tracker keeps how the run ended, beside or instead of a status of its own."""


@dataclass(frozen=True)
class RunStart:
    """How a run starts in a tracker.

    Args:
        is_quiet: Whether the tracker's own messages are held back.
    """

    place: RunPlace
    kwargs: Mapping[str, Any]
    is_quiet: bool = False
    resume: Resume = Resume()


class TrackerSpec:
    """One kind of tracker, before a run exists; `log_with` takes the class, an instance with arguments, or its name.

    The tracker of a run is what `build` returns: a `TrackerRun` with `log_rows(rows)`, `finish(status)` and, where
    there are such, `run_id`, `add_images(media)`, `add_table(media)` and `add_artifact(media)`.

    Args:
        init_kwargs: Arguments of the tracker's start, as in `MLFlow(tags={"team": "news"})`.

    Attributes:
        name: Its lower-case name, which is also that of its file and of the module that it imports.
        package: What to install.
        kwargs_of: The class or function whose keywords its start takes, as `module:name`.
        reserved: Those of them that accmt sets.
        takes_url: Whether `logging_dir` may be the URL of its server.
        rewinding: What it does with points that a resumed run takes back.
    """

    name: str
    package: ClassVar[str]
    kwargs_of: ClassVar[str]
    reserved: ClassVar[frozenset[str]] = frozenset()
    takes_url: ClassVar[bool] = False
    rewinding: ClassVar[Rewinding] = Rewinding.KEEPS

    def __init__(self, **init_kwargs: Any) -> None:
        remember(init_kwargs)
        self.init_kwargs = init_kwargs

    def accepted_names(self) -> frozenset[str] | None:
        """Return the keywords that the tracker's start takes; None where it takes any."""
        names = parameter_names(resolve_name(self.kwargs_of))
        return None if names is None else names - self.reserved

    def build(self, start: RunStart) -> GeneralTracker:
        """Make the tracker of one run; the caller starts it."""
        raise NotImplementedError

    def server(self, place: RunPlace) -> str | None:
        """Return the URL of the store that the tracker uses; None for one in the folder of logs."""
        return None

    def is_remote(self, place: RunPlace, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the tracker, started with `kwargs`, reaches its store over the network."""
        return False

    def missing_key(self, kwargs: Mapping[str, Any]) -> str | None:
        """Return how to provide the key that the tracker needs to reach its service; None where nothing is missing."""
        return None

    def upload_command(self, place: RunPlace) -> str:
        """Return the command that uploads to the service what a run without a key left in files."""
        return ""

    def deliver(self, tracker: GeneralTracker, rows: Sequence[Row]) -> Iterator[int]:
        """Log rows in their order; yields how many more of them the tracker has."""
        tracker.log_rows(rows)
        yield len(rows)

    def takes(self, tracker: GeneralTracker, kind: Kind) -> bool:
        """Return whether the tracker has a place for images, tables or artifacts."""
        return hasattr(tracker, f"add_{kind}")

    def deliver_media(self, tracker: GeneralTracker, media: Media) -> None:
        getattr(tracker, f"add_{media.kind}")(media)

    def is_outage(self, error: BaseException | None) -> bool:
        """Return whether an error of the tracker means that its service cannot be reached at the moment."""
        return is_outage(error)

    def is_refusal(self, error: BaseException) -> bool:
        """Return whether an error of the tracker means that it will never take a row, because of its content."""
        return False

    def attach(self, tracker: GeneralTracker) -> None:
        """Do what a started tracker needs on the main thread, where a user's own code calls its library."""

    def detach(self, tracker: GeneralTracker, status: str) -> None:
        """Undo `attach`, after the tracker's run was ended or given up."""

    def clean_name(self, name: str) -> str:
        """Return the name under which the tracker keeps a metric or a parameter."""
        return name

    def finish(self, tracker: GeneralTracker, status: str) -> None:
        tracker.finish(status)

    def run_id(self, tracker: GeneralTracker) -> str | None:
        """Return the id by which the tracker's service knows the run, if it has one."""
        run_id = getattr(tracker, "run_id", None)
        return None if run_id is None else str(run_id)

    def dashboard_command(self, place: RunPlace) -> list[str]:
        """Return the command that shows the runs in a browser; empty where there is nothing to start."""
        return []


if TYPE_CHECKING:
    _Base: Any
else:
    _Base = object


class TrackerRun(_Base):  # type: ignore[misc]
    """What accmt adds to one of Accelerate's trackers.

    Accelerate's class becomes a base when the first object is made, not where the class is written: otherwise naming
    a tracker would import Accelerate, which takes a third of a second.

    Attributes:
        base: Accelerate's class, as `module:name`.
        settles_in_s: After how long a kill no longer takes a row from the tracker; infinite until its end.
    """

    base: ClassVar[str]
    settles_in_s: float = 0.0

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        run: Self = object.__new__(_with_base(cls))  # type: ignore[arg-type]
        return run


@cache
def _with_base(run: type[TrackerRun]) -> type[TrackerRun]:
    return type(run.__name__, (run, resolve_name(run.base)), {})


class ServiceSpec(TrackerSpec):
    """A tracker with accounts: it needs a key, and has a mode of its own in which it only writes files."""

    key_advice: ClassVar[str]

    def has_key(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the service's key is known; nobody is asked for it."""
        raise NotImplementedError

    def is_offline_wanted(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the user told the tracker to leave its service alone."""
        raise NotImplementedError

    def is_offline(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the run goes to files instead of the service."""
        return self.is_offline_wanted(kwargs) or not self.has_key(kwargs)

    def is_remote(self, place: RunPlace, kwargs: Mapping[str, Any]) -> bool:
        return not self.is_offline(kwargs)

    def missing_key(self, kwargs: Mapping[str, Any]) -> str | None:
        return None if self.is_offline_wanted(kwargs) or self.has_key(kwargs) else self.key_advice


class UserTracker(TrackerSpec):
    """A user's own Accelerate tracker: an instance, or a class.

    A class is called with those of `run_name`, `track_name`, `project_name`, `experiment_name` and `logging_dir` (the
    run folder) that its constructor names, and with the Trainer's further keywords that it takes.

    A resumed run is a new start for it: nobody can know whether it continues the old one. It gets the rows after the
    checkpoint, and those before it that it had not got. Its `start`, `log` and `finish` are called from one thread, and
    so are those of `log_images`, `log_table`, `log_artifact` and `log_artifacts` that it has, as Accelerate names them.
    """

    rewinding = Rewinding.UNKNOWN

    def __init__(self, tracker: GeneralTracker | type[GeneralTracker]) -> None:
        super().__init__()
        self._tracker = tracker
        own_name = getattr(tracker, "name", None)
        self.name = own_name if isinstance(own_name, str) else getattr(tracker, "__name__", type(tracker).__name__)

    def accepted_names(self) -> frozenset[str] | None:
        return parameter_names(self._tracker) if isinstance(self._tracker, type) else frozenset()

    def build(self, start: RunStart) -> GeneralTracker:
        if not isinstance(self._tracker, type):
            return self._tracker
        place = start.place
        project = dict.fromkeys(("track_name", "project_name", "experiment_name"), place.track_name)
        offered = {**project, "run_name": place.run_name, "logging_dir": str(place.run_folder)}
        named = inspect.signature(self._tracker).parameters
        return self._tracker(**{**{name: value for name, value in offered.items() if name in named}, **start.kwargs})

    def deliver(self, tracker: GeneralTracker, rows: Sequence[Row]) -> Iterator[int]:
        for row in rows:
            tracker.log(dict(row.values), step=row.step)
            yield 1

    def takes(self, tracker: GeneralTracker, kind: Kind) -> bool:
        return hasattr(tracker, f"log_{kind}")

    def deliver_media(self, tracker: GeneralTracker, media: Media) -> None:
        if media.kind == "images":
            tracker.log_images({media.name: list(media.images().values())}, step=media.step)
        elif media.kind == "table":
            columns, rows = media.table()
            tracker.log_table(media.name, columns=columns, data=rows, step=media.step)
        elif media.path.is_dir() and hasattr(tracker, "log_artifacts"):
            tracker.log_artifacts(str(media.path), artifact_path=media.name)
        else:
            tracker.log_artifact(str(media.path))

    def finish(self, tracker: GeneralTracker, status: str) -> None:
        tracker.finish()

    def run_id(self, tracker: GeneralTracker) -> str | None:
        return None


def parameter_names(function: Any) -> frozenset[str] | None:
    """Return the names of a function's parameters; None where it takes any keyword."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters)
