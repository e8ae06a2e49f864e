"""What accmt asks of a tracker, and the answers of those that users bring along."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from accmt.tracking.media import Kind, Media
from accmt.tracking.outage import is_outage
from accmt.tracking.replay import Resume, Rewinding, Row
from accmt.tracking.run_folder import RunPlace

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

NEW_RUN = Resume()


class TrackerSpec:
    """One kind of tracker; the class itself, an instance with arguments, or its name may be given as `log_with`.

    Args:
        init_kwargs: Arguments of the tracker's start, as in `MLFlow(tags={"team": "news"})`.
    """

    name: str
    package: ClassVar[str]
    takes_url: ClassVar[bool] = False
    rewinding: ClassVar[Rewinding] = Rewinding.UNKNOWN

    def __init__(self, **init_kwargs: Any) -> None:
        self.init_kwargs = init_kwargs

    def accepted_names(self) -> frozenset[str] | None:
        """Return the keywords that the tracker's start takes; None where it takes any."""
        raise NotImplementedError

    def build(
        self, place: RunPlace, kwargs: Mapping[str, Any], *, is_quiet: bool, resume: Resume = NEW_RUN
    ) -> GeneralTracker:
        """Make the tracker of one run; its `start` is left to the caller.

        Args:
            place: Where the records of the run go.
            kwargs: Arguments of the tracker's start.
            is_quiet: Whether the tracker's own messages are held back.
            resume: The run to go on with.
        """
        raise NotImplementedError

    def server(self, place: RunPlace) -> str | None:
        """Return the URL of the store that the tracker uses; None for one in the folder of logs."""
        del place
        return None

    def is_remote(self, place: RunPlace, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the tracker, started with `kwargs`, reaches its store over the network."""
        del place, kwargs
        return False

    def missing_key(self, kwargs: Mapping[str, Any]) -> str | None:
        """Return how to give the key that the tracker needs to reach its service; None where nothing is missing."""
        del kwargs
        return None

    def upload_command(self, place: RunPlace) -> str:
        """Return the command that hands to the service what a run without a key left in files."""
        del place
        return ""

    def settles_in_s(self, tracker: GeneralTracker) -> float:
        """Return the seconds after which a kill no longer takes a row from the tracker; infinite until its end."""
        del tracker
        return 0.0

    def deliver(self, tracker: GeneralTracker, rows: Sequence[Row]) -> Iterator[int]:
        """Log rows in their order.

        Yields:
            How many more of them the tracker has.
        """
        for row in rows:
            tracker.log(dict(row.values), step=row.step)
            yield 1

    def takes(self, tracker: GeneralTracker, kind: Kind) -> bool:
        """Return whether the tracker has a place for images, tables or artifacts."""
        return hasattr(tracker, f"add_{kind}")

    def deliver_media(self, tracker: GeneralTracker, media: Media) -> None:
        """Log images, a table or an artifact."""
        getattr(tracker, f"add_{media.kind}")(media)

    def is_outage(self, error: BaseException | None) -> bool:
        """Return whether an error of the tracker says that its service cannot be reached at the moment."""
        return is_outage(error)

    def is_refusal(self, error: BaseException) -> bool:
        """Return whether an error of the tracker says that it will never take a row, for what is in it."""
        del error
        return False

    def attach(self, tracker: GeneralTracker) -> None:
        """Do what a started tracker needs on the main thread, where a user's own code calls its library."""
        del tracker

    def detach(self, tracker: GeneralTracker, status: str) -> None:
        """Undo `attach`, after the tracker's run was ended or given up."""
        del tracker, status

    def clean_name(self, name: str) -> str:
        """Return the name under which the tracker keeps a metric or a parameter."""
        return name

    def finish(self, tracker: GeneralTracker, status: str) -> None:
        """End the run with `status`, where the tracker knows one."""
        del status
        tracker.finish()

    def run_id(self, tracker: GeneralTracker) -> str | None:
        """Return the id by which the tracker's service knows the run, if it has one."""
        del tracker
        return None

    def dashboard_command(self, place: RunPlace) -> list[str]:
        """Return the command that shows the runs in a browser; empty where there is nothing to start."""
        del place
        return []


class GivenTracker(TrackerSpec):
    """A user's own Accelerate tracker: an instance, or a class.

    A class is called with those of `run_name`, `track_name`, `project_name`, `experiment_name` and `logging_dir` (the
    run folder) that its constructor names, and with the Trainer's further keywords that it takes.

    A resumed run is a new start for it: nobody can know whether it goes on with the old one. It gets the rows after the
    checkpoint, and those before it that it had not got. Its `start`, `log` and `finish` are called from one thread, and
    so are those of `log_images`, `log_table`, `log_artifact` and `log_artifacts` that it has, as Accelerate names them.
    """

    def __init__(self, given: GeneralTracker | type[GeneralTracker]) -> None:
        super().__init__()
        self._given = given
        own_name = getattr(given, "name", None)
        self.name = own_name if isinstance(own_name, str) else getattr(given, "__name__", type(given).__name__)

    def accepted_names(self) -> frozenset[str] | None:
        """As `TrackerSpec.accepted_names`; an instance takes none any more."""
        return parameter_names(self._given) if isinstance(self._given, type) else frozenset()

    def build(
        self, place: RunPlace, kwargs: Mapping[str, Any], *, is_quiet: bool, resume: Resume = NEW_RUN
    ) -> GeneralTracker:
        """As `TrackerSpec.build`."""
        del is_quiet, resume
        if not isinstance(self._given, type):
            return self._given
        project = dict.fromkeys(("track_name", "project_name", "experiment_name"), place.track_name)
        offered = {**project, "run_name": place.run_name, "logging_dir": str(place.run_folder)}
        named = inspect.signature(self._given).parameters
        return self._given(**{**{name: value for name, value in offered.items() if name in named}, **kwargs})

    def takes(self, tracker: GeneralTracker, kind: Kind) -> bool:
        """As `TrackerSpec.takes`."""
        return hasattr(tracker, f"log_{kind}")

    def deliver_media(self, tracker: GeneralTracker, media: Media) -> None:
        """As `TrackerSpec.deliver_media`."""
        if media.kind == "images":
            tracker.log_images({media.name: list(media.images().values())}, step=media.step)
        elif media.kind == "table":
            columns, rows = media.table()
            tracker.log_table(media.name, columns=columns, data=rows, step=media.step)
        elif media.path.is_dir() and hasattr(tracker, "log_artifacts"):
            tracker.log_artifacts(str(media.path), artifact_path=media.name)
        else:
            tracker.log_artifact(str(media.path))


def parameter_names(function: Any, without: frozenset[str] | set[str] = frozenset()) -> frozenset[str] | None:
    """Return the names of a function's parameters; None where it takes any keyword."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters) - without
