"""The interface of trackers: base classes for the files in `trackers/`, a user's tracker, and `log_with`."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pkgutil import resolve_name
from textwrap import shorten
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

from accmt.addons.trackers.delivery_state import Resume, Rewinding, Row
from accmt.errors import ArgumentError, MissingPackageError, UnknownArgumentError, explain, fail, nearest
from accmt.messages import say, warn
from accmt.registry import find, is_built_in, names
from accmt.secrets import remember
from accmt.tracking.history import RunPlace
from accmt.tracking.values import Kind, Media

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

# ---- Outages: retry delays and the warning


_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 0.5
_LONG_OUTAGE_S = 60.0
_LONG_OUTAGE_DELAY_S = 5.0
_TRIES_BEFORE_WARNING = 3


class Outage:
    """The failures of one tracker since its last successful delivery."""

    def __init__(self, tracker: str, where_rows_wait: str) -> None:
        self._tracker = tracker
        self._where_rows_wait = where_rows_wait
        self._began = 0.0
        self.num_failures = 0
        self.error: BaseException | None = None

    def count(self, error: BaseException) -> float:
        """Count one failure; warn at the third in a row.

        Returns:
            The seconds to wait before the next attempt.
        """
        self._add(error, 1)
        if self.num_failures == _TRIES_BEFORE_WARNING:
            self._warn()
        longest = _LONGEST_DELAY_S
        if time.monotonic() - self._began >= _LONG_OUTAGE_S:  # it may be down for hours
            longest = _LONG_OUTAGE_DELAY_S
        return float(min(_FIRST_DELAY_S * 2 ** min(self.num_failures - 1, 10), longest))

    def announce(self, error: BaseException) -> None:
        """Count a failure and warn immediately."""
        self._add(error, _TRIES_BEFORE_WARNING)
        self._warn()

    def end(self) -> None:
        """Reset the failures, and log the recovery if there was a warning."""
        if self.num_failures >= _TRIES_BEFORE_WARNING:
            seconds = time.monotonic() - self._began
            say(f"the tracker {self._tracker} accepts rows again after {seconds:.1f} s; delivering those that waited")
        self.num_failures = 0
        self.error = None

    def _add(self, error: BaseException, count: int) -> None:
        if self.num_failures == 0:
            self._began = time.monotonic()
        self.num_failures += count
        self.error = error

    def _warn(self) -> None:
        expected = f"a tracker that accepts rows; training continues, and rows wait in {self._where_rows_wait}"
        do = "no action needed: rows are delivered as soon as the tracker accepts them"
        warn(explain(f"the tracker {self._tracker}", name_error(self.error), expected, do))


def is_outage(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes is a connection error or a timeout, rather than a mistake."""
    while error is not None:
        if isinstance(error, OSError) and not isinstance(error, _MISTAKES):
            return True
        error = error.__cause__ or error.__context__
    return False


def name_error(error: BaseException | None) -> str:
    """Return a short form of an error: libraries' messages about an unreachable server fill half a screen."""
    if error is None:
        return "no answer"
    return shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")


# Includes ValueError, because request libraries derive errors for malformed URLs from both.
_MISTAKES = (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


@dataclass(frozen=True)
class RunStart:
    """How a run starts in a tracker.

    Args:
        is_quiet: Whether to suppress the tracker's own messages.
    """

    place: RunPlace
    kwargs: Mapping[str, Any]
    is_quiet: bool = False
    resume: Resume = Resume()


class TrackerSpec:
    """Describes a kind of tracker; `log_with` accepts the class, an instance with arguments, or its name.

    `build` returns the tracker of a run: a `TrackerRun` with `log_rows(rows)`, `finish(status)` and optionally
    `run_id`, `add_images(media)`, `add_table(media)` and `add_artifact(media)`.

    Args:
        init_kwargs: Arguments for starting the tracker, as in `MLFlow(tags={"team": "news"})`.

    Attributes:
        name: The lower-case name, which is also the name of its file and of the module that it imports.
        package: The package to install.
        kwargs_of: The class or function that defines the accepted keywords, as `module:name`.
        reserved: Keywords that accmt sets.
        takes_url: Whether `logging_dir` may be the URL of its server.
        rewinding: How it handles points that a resumed run supersedes.
        is_exclusive: Whether only one process at a time can log to a run.
    """

    name: str
    package: ClassVar[str]
    kwargs_of: ClassVar[str]
    reserved: ClassVar[frozenset[str]] = frozenset()
    takes_url: ClassVar[bool] = False
    rewinding: ClassVar[Rewinding] = Rewinding.KEEPS
    is_exclusive: ClassVar[bool] = False

    def __init__(self, **init_kwargs: Any) -> None:
        remember(init_kwargs)
        self.init_kwargs = init_kwargs

    def accepted_names(self) -> frozenset[str] | None:
        """Return the accepted keywords; None if any keyword is accepted."""
        names = parameter_names(resolve_name(self.kwargs_of))
        return None if names is None else names - self.reserved

    def build(self, start: RunStart) -> GeneralTracker:
        """Create the tracker of one run; the caller starts it."""
        raise NotImplementedError

    def server(self, place: RunPlace) -> str | None:
        """Return the URL of the tracker's store; None for one in the logging folder."""
        return None

    def is_remote(self, place: RunPlace, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the tracker, started with `kwargs`, uses the network."""
        return False

    def require_access(self, place: RunPlace, kwargs: Mapping[str, Any], *, is_needed: bool) -> None:
        """Check before a run whether its tracker's service will accept it, as far as that is known here.

        Args:
            is_needed: Whether the service has to be reached, because of `tracker_options={"offline": False}`.
        """

    def deliver(self, tracker: GeneralTracker, rows: Sequence[Row]) -> Iterator[int]:
        """Log rows in order; yields how many more rows were delivered."""
        tracker.log_rows(rows)
        yield len(rows)

    def takes(self, tracker: GeneralTracker, kind: Kind) -> bool:
        """Return whether the tracker supports images, tables or artifacts."""
        return hasattr(tracker, f"add_{kind}")

    def deliver_media(self, tracker: GeneralTracker, media: Media) -> None:
        getattr(tracker, f"add_{media.kind}")(media)

    def is_outage(self, error: BaseException | None) -> bool:
        """Return whether an error means that the tracker's service is temporarily unavailable."""
        return is_outage(error)

    def is_refusal(self, error: BaseException) -> bool:
        """Return whether an error means that the tracker will never accept a row, because of its content."""
        return False

    def attach(self, tracker: GeneralTracker) -> None:
        """Set up the started tracker on the main thread, where user code calls its library."""

    def detach(self, tracker: GeneralTracker, status: str) -> None:
        """Undo `attach` after the tracker's run was ended or abandoned."""

    def clean_name(self, name: str) -> str:
        """Return a valid name for a metric or a parameter in the tracker."""
        return name

    def finish(self, tracker: GeneralTracker, status: str) -> None:
        tracker.finish(status)

    def run_id(self, tracker: GeneralTracker) -> str | None:
        """Return the id of the run in the tracker's service, if there is one."""
        run_id = getattr(tracker, "run_id", None)
        return None if run_id is None else str(run_id)

    def dashboard_command(self, place: RunPlace) -> list[str]:
        """Return the command that shows the runs in a browser; empty if there is nothing to start."""
        return []


if TYPE_CHECKING:
    _Base: Any
else:
    _Base = object


class TrackerRun(_Base):  # type: ignore[misc]
    """Extends one of Accelerate's trackers.

    Accelerate's class becomes a base when the first object is created, not in the class statement: otherwise naming
    a tracker would import Accelerate, which takes a third of a second.

    Attributes:
        base: Accelerate's class, as `module:name`.
        settles_in_s: The time after which a kill no longer loses a row; infinite means only after the run has ended.
    """

    base: ClassVar[str]
    settles_in_s: float = 0.0

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        run: Self = object.__new__(_with_base(cls))  # type: ignore[arg-type]
        return run


@cache
def _with_base(run: type[TrackerRun]) -> type[TrackerRun]:
    return type(run.__name__, (run, resolve_name(run.base)), {})


class UserTracker(TrackerSpec):
    """Adapter for a user's Accelerate tracker: an instance or a class.

    A class is called with the arguments that its constructor declares out of `run_name`, `track_name`, `project_name`,
    `experiment_name` and `logging_dir` (the run folder), and with the Trainer's extra keywords that it accepts.

    A resumed run starts the tracker as usual, because accmt cannot know whether it continues the old one. It gets the
    rows after the checkpoint, and earlier rows that were not delivered. `start`, `log`, `finish` and, if defined,
    `log_images`, `log_table`, `log_artifact` and `log_artifacts` are all called from one thread.
    """

    rewinding = Rewinding.UNKNOWN

    def __init__(self, tracker: GeneralTracker | type[GeneralTracker]) -> None:
        super().__init__()
        self._tracker = tracker
        name: Any = getattr(tracker, "name", None)
        if not isinstance(name, str):  # Accelerate's base class only declares it
            name = getattr(tracker, "__name__", type(tracker).__name__)
        self.name = name

    def accepted_names(self) -> frozenset[str] | None:
        return parameter_names(self._tracker) if isinstance(self._tracker, type) else frozenset()

    def build(self, start: RunStart) -> GeneralTracker:
        if not isinstance(self._tracker, type):
            return self._tracker
        place = start.place
        project = dict.fromkeys(("track_name", "project_name", "experiment_name"), place.track_name)
        offered = {**project, "run_name": place.run_name, "logging_dir": str(place.run_folder)}
        parameters = inspect.signature(self._tracker).parameters
        arguments = {name: value for name, value in offered.items() if name in parameters}
        return self._tracker(**{**arguments, **start.kwargs})

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
    """Return the names of a function's parameters; None if it accepts any keyword."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters)


# ---- From the Trainer's `log_with` and tracker keywords to trackers and their arguments.


GROUP = "accmt.trackers"
"""The extension point of trackers: `log_with` accepts the names in it."""


def resolve_trackers(log_with: Any) -> list[TrackerSpec]:
    """Turn the Trainer's `log_with` into the trackers of a run.

    Args:
        log_with: None or False for none, True for TensorBoard, a tracker's class, instance or lower-case name, a class
            or instance of any Accelerate `GeneralTracker`, or a list of these.

    Raises:
        ArgumentError: An entry is not a tracker (the message suggests the closest name), or a tracker is listed twice.
        MissingPackageError: The tracker's package is not installed.
    """
    specs = find_specs(log_with)
    for spec in specs:
        if isinstance(spec, UserTracker):  # whose name may be that of no module
            continue
        module = find_spec(spec.name)
        # Without an origin it is only a folder of that name, such as the `wandb` folder that wandb runs leave.
        if module is None or module.origin is None:
            where, do = f"Trainer(log_with={type(spec).__name__})", f"pip install {spec.package}"
            got = f"the package {spec.package} is not installed"
            raise fail(MissingPackageError, where, got=got, expected="the tracker's package", do=do)
    return specs


def describe_trackers(log_with: Any) -> dict[str, Any] | None:
    """Return the Trainer's arguments that recreate trackers; None if one is of the user's class, which no name does."""
    specs = resolve_trackers(log_with)
    if any(isinstance(spec, UserTracker) for spec in specs):
        return None
    arguments: dict[str, Any] = {spec.name: spec.init_kwargs for spec in specs if spec.init_kwargs}
    if specs:
        arguments["log_with"] = [spec.name for spec in specs]
    return arguments


def find_specs(log_with: Any) -> list[TrackerSpec]:
    """Like `resolve_trackers`, without checking whether packages are installed."""
    if log_with is None or log_with is False:
        return []
    if log_with is True:
        log_with = "tensorboard"
    entries = log_with if isinstance(log_with, list | tuple) else [log_with]
    specs = list(map(_find_spec, entries))
    names = [spec.name for spec in specs if not isinstance(spec, UserTracker)]
    for name in names:
        if names.count(name) > 1:  # each row would be in one run twice
            got, do = f"{name!r} {names.count(name)} times", f"keep one {name!r}"
            raise fail(ArgumentError, "Trainer(log_with=...)", got=got, expected="each tracker once", do=do)
    return specs


def kwargs_of_each(specs: Sequence[TrackerSpec], kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Distribute keywords to trackers.

    `mlflow={...}` is only for MLflow; any other keyword goes to every tracker that accepts it.
    """
    by_tracker = {spec.name: dict(kwargs[spec.name]) for spec in specs if isinstance(kwargs.get(spec.name), Mapping)}
    shared = {name: value for name, value in kwargs.items() if name not in by_tracker}
    known: set[str] = set()
    kwargs_of_specs = []
    for spec in specs:
        direct = {**spec.init_kwargs, **by_tracker.get(spec.name, {})}
        # Without keywords, the class that defines them need not be imported.
        accepted = spec.accepted_names() if shared or direct else None
        _require_accepted(direct, accepted, f"Trainer({spec.name}={{...}})")
        if accepted is None:
            accepted = frozenset(shared)
        known |= accepted
        kwargs_of_specs.append({**{name: value for name, value in shared.items() if name in accepted}, **direct})
    _require_accepted(shared, frozenset(known), "Trainer(...)")
    return kwargs_of_specs


def _find_spec(entry: Any) -> TrackerSpec:
    if isinstance(entry, str):
        return _find_named(entry)
    if isinstance(entry, TrackerSpec):
        return entry
    if isinstance(entry, type) and issubclass(entry, TrackerSpec):
        return entry()
    from accelerate.tracking import GeneralTracker

    kind = entry if isinstance(entry, type) else type(entry)
    if not issubclass(kind, GeneralTracker):
        _reject_unknown(entry)
    # Accelerate's class for a service of which accmt has a tracker, which resumes and delivers in the background.
    if kind is entry and kind.__module__ == GeneralTracker.__module__ and is_built_in(GROUP, kind.name):
        return _find_named(kind.name)
    return UserTracker(entry)


def _find_named(name: str) -> TrackerSpec:
    try:
        tracker = find(GROUP, name.lower())
    except KeyError:
        _reject_unknown(name)
    return _find_spec(tracker)


def _reject_unknown(entry: Any) -> NoReturn:
    known = names(GROUP)
    got = f"{entry!r} ({type(entry).__name__})"
    expected = f"{', '.join(known)}, a tracker class, any Accelerate GeneralTracker, or a list of these"
    do = "for example log_with='tensorboard'"
    similar = nearest(entry, known, cutoff=0.5)
    if similar:
        do = f"did you mean log_with={similar!r}?"
    raise fail(ArgumentError, "Trainer(log_with=...)", got=got, expected=expected, do=do)


def _require_accepted(names: Iterable[str], accepted: frozenset[str] | None, where: str) -> None:
    if accepted is None:
        return
    for name in names:
        if name not in accepted:
            similar = nearest(name, accepted)
            do = f"did you mean {similar}=...?" if similar else f"leave out {name}"
            got, expected = f"{name}=..., which no tracker accepts", "a keyword of a tracker in log_with"
            if accepted:
                expected += f": {', '.join(sorted(accepted))}"
            raise fail(UnknownArgumentError, where, got=got, expected=expected, do=do)
