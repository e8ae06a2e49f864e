"""Requests to end a run early, and failures."""

from __future__ import annotations

from accmt.failures.board import Board as Board
from accmt.failures.board import Machine as Machine
from accmt.failures.board import find_machines as find_machines
from accmt.failures.interruption import Clock as Clock
from accmt.failures.interruption import Interruption as Interruption
from accmt.failures.interruption import Reason as Reason
from accmt.failures.interruption import listening as listening
from accmt.failures.watch import Watch as Watch
from accmt.failures.watch import is_consequence as is_consequence
from accmt.failures.watch import kind_of as kind_of
from accmt.failures.watch import record_for_launcher as record_for_launcher
