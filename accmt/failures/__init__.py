"""Requests to end a run early, and failures."""

from __future__ import annotations

from accmt.failures.board import Board as Board
from accmt.failures.interruption import Clock as Clock
from accmt.failures.interruption import Interruption as Interruption
from accmt.failures.interruption import Reason as Reason
from accmt.failures.interruption import listening as listening
from accmt.failures.kinds import is_consequence as is_consequence
from accmt.failures.kinds import kind_of as kind_of
from accmt.failures.kinds import record_for_launcher as record_for_launcher
from accmt.failures.watch import Watch as Watch
