"""Faults in the Trainer's arguments, collected so that all are reported at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accmt.errors import ArgumentError, HyperParameterError, SeveralFaultsError


class Faults:
    """The errors of checks that continue after one."""

    def __init__(self) -> None:
        self._errors: list[ArgumentError | HyperParameterError] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep an error about arguments or hyper-parameters for later."""
        try:
            yield
        except (ArgumentError, HyperParameterError) as error:
            self._errors.append(error)

    def raise_any(self) -> None:
        """Raise what was collected, if anything.

        Raises:
            ArgumentError: There are faults in arguments alone.
            HyperParameterError: There are faults in the hyper-parameters alone.
            SeveralFaultsError: There are both.
        """
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            is_mixed = any(isinstance(error, HyperParameterError) for error in self._errors)
            kind = SeveralFaultsError if is_mixed else ArgumentError
            raise kind("\n\n".join(["faults in several places", *map(str, self._errors)]))
