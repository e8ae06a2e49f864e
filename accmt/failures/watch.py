"""What a run asks of the watch for other processes; the watch itself is an add-on."""

from __future__ import annotations

from accmt.failures.interruption import Interruption
from accmt.failures.kinds import kind_of
from accmt.options.failures import Handler


class Watch:
    """Watches nothing: a single process waits for no other. With several, `ProcessWatch` of the add-on does.

    Args:
        interruption: Requests to end the run, which the watch receives and sends.

    Attributes:
        is_apart: Whether this process failed while others did not, so that no collective is possible any more.
    """

    is_apart = False

    def __init__(self, interruption: Interruption) -> None:
        self.interruption = interruption

    def start(self) -> None:
        """Watch signals and the other processes."""

    def stop(self) -> None:
        """Stop watching; a process that is apart exits soon, even if its exit would wait for one that has died."""

    def report_failure(self, error: BaseException) -> None:
        """Send the error that ends this process to the other processes."""

    def explain(self, error: BaseException) -> BaseException:
        """Return an error that names the process whose failure caused this one; the error itself if there is none."""
        return error

    def kinds_of(self, error: BaseException) -> set[Handler | None]:
        """Return the kind of an error, including the kinds of the errors on other processes that caused it."""
        return {kind_of(error)}
