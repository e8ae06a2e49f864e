"""Records in the ledger what each optimizer step of a run computed.

Losses stay on the device, and in each process, until lines are written: every few steps, and before each checkpoint.
A run that resumes compares what it makes again with the lines that were written after its checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from accmt.addons.flight_recorder.checksums import add_over_processes, combine, digest_batch, sum_of_state, sums_of
from accmt.addons.flight_recorder.examiner import Examination, find_operations
from accmt.addons.flight_recorder.facts import describe_start, find_changes
from accmt.addons.flight_recorder.ledger import KINDS, LedgerFile, find_difference, keep, key_of
from accmt.addons.watch import ProcessWatch
from accmt.checkpoint.state_dicts import plain_parameter_names
from accmt.data import MicroBatch
from accmt.errors import StepDiffersError, fail
from accmt.files import current_folder
from accmt.messages import say_once, warn_once
from accmt.metrics.averages import Weight, exact_sum, stack
from accmt.options import Ledger
from accmt.options.optimizer_and_scheduler_arguments import state_of
from accmt.processes import broadcast_object, each_once, gather_from_data, is_main_process, num_processes
from accmt.run import EvaluationRun, Run
from accmt.run.features import Feature
from accmt.sharded_tensors import is_dtensor
from accmt.state import Place

_STEPS_PER_WRITE = 20
_PENDING = "ledger"
_WAIT_S, _TICK_S = 3.0, 0.05  # for the other processes after an error
_Own = tuple[str | None, str, list[tuple[float, float]]]  # of a window: digests of order and content; losses, weights


class _Window(NamedTuple):
    step: int
    epoch: int
    first: int
    last: int
    samples: str | None
    content: str
    made_step: bool
    end: int  # of its losses, among those that are not written yet


class Recorder(Feature):
    """Writes the ledger on the main process; the others send it their losses."""

    name = "flight_recorder"

    def __init__(self, run: Run, options: Ledger) -> None:
        self._run = run
        self._options = options
        self._every = options.steps
        self._file: LedgerFile | None = None
        self._is_started = False
        self._losses: list[torch.Tensor] = []
        self._weights: list[Weight] = []
        self._windows: list[_Window] = []
        self._epoch, self._last = 0, 0
        self._wants_operations = False
        self._is_due = True  # of checksums, in the current window
        self._gradients: list[int] | None = None
        self._contents: list[str] = []
        self._summed_at: tuple[int, int] | None = None
        self._names: list[str] = []
        self._resumed: dict[str, Any] | None = None
        self._before: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._changes: list[str] = []
        self._callbacks: list[str] = []  # how they have changed: most change nothing of what a step computes
        self._is_comparing = False
        self._found: StepDiffersError | None = None

    @classmethod
    def for_run(cls, run: EvaluationRun) -> Recorder | None:
        options = run.settings.tracking.ledger_options
        is_off = options is None or run.settings.running.fast_dev_run or not isinstance(run, Run)
        return None if is_off or options is None or not isinstance(run, Run) else cls(run, options)

    # ---- The start

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = state

    def on_start(self) -> None:
        """Write what the run starts with, and find the lines that it makes again."""
        run = self._run
        start = describe_start(run)
        self._names = list(plain_parameter_names(run.unwrapped_model))
        start["tensors"] = self._names
        self._epoch, self._last = run.state.epoch, run.state.train_step
        if is_main_process():
            self._open(current_folder() / run.tracking.run_folder, start)
        self._is_comparing = broadcast_object(bool(self._before))
        is_replay = isinstance(self._options, Examination)
        self._wants_operations = not start["is_deterministic"] and (self._is_comparing or is_replay)
        self._is_started = True
        if not run.is_resumed:
            self._write_sums("start")

    def _open(self, folder: Path, start: dict[str, Any]) -> None:
        self._file = file = LedgerFile(folder)
        before = file.before
        own = self._resumed or {"line": 0, "chain": ""}
        line = own["line"]
        is_of_run = line == 0 or before.chains[line - 1 : line] == [own["chain"]]
        if is_of_run and file.lines > line:
            if self._resumed is not None:
                for number, found in enumerate(before.lines[line:], line):
                    keep(self._before, {**found, "number": number})
                earlier = before.start_of(file.lines)
                # After a rollback, or with smaller micro-batches, other steps are made on purpose.
                if earlier.get("lessons") != start["lessons"]:
                    self._before = {}
                self._callbacks = find_changes(earlier.get("settings", {}), start["settings"], ["callbacks"])
                self._changes = [change for change in find_changes(earlier, start) if change not in self._callbacks]
                if not start["is_deterministic"]:
                    self._changes.append(f"{start['device']} computes without torch_flags={{'deterministic': True}}")
            file.add({"rewind": {"line": line, "step": self._run.state.global_step}})
        file.add({"start": start, "time": time.time()})
        file.flush()

    # ---- Each step

    def before_batch(self, micro_batch: MicroBatch) -> None:
        if self._wants_operations and not micro_batch.is_partial:
            self._wants_operations = False
            try:  # operations without a deterministic implementation may explain a difference
                operations = find_operations(self._run, broadcast_object(micro_batch.batch))
            except Exception as error:  # noqa: BLE001 - an attempt only
                operations = [f"unknown ({type(error).__name__} while looking for them)"]
            if self._file is not None:
                self._file.add({"operations": operations})
            if operations:
                device = self._run.device.type
                self._changes.append(f"no deterministic implementation on {device}: {', '.join(operations)}")
        if micro_batch.batch is not None:
            self._contents.append(digest_batch(micro_batch.batch))

    def after_batch(self, loss: torch.Tensor, weight: Weight, place: Place) -> None:
        self._losses.append(loss)
        self._weights.append(weight)

    def on_gradients(self) -> None:
        if self._is_due:
            parameters = plain_parameter_names(self._run.unwrapped_model).values()
            self._gradients = self._sum([parameter.grad for parameter in parameters])

    def after_window(self, *, made_step: bool) -> None:
        state = self._run.state
        epoch, last = state.epoch, state.train_step
        first = self._last if epoch == self._epoch else 0
        self._epoch, self._last = epoch, last
        samples = self._run.loaders.train.source.digest_of_samples(first, last)
        step = state.global_step if made_step else state.global_step + 1
        content, self._contents = " ".join(self._contents), []
        self._windows.append(_Window(step, epoch, first, last, samples, content, made_step, len(self._losses)))
        if self._is_due:
            self._flush()
            self._write_sums("step")
        elif len(self._windows) >= _STEPS_PER_WRITE:
            self._flush()
        every = self._every
        self._is_due = every is not None and (state.global_step + 1) % every == 0

    # ---- Writing

    def state_dict(self) -> dict[str, Any]:
        """Write everything up to a checkpoint, and return where the ledger is then."""
        if not self._is_started:
            return {}
        self._flush()
        place = self._run.state.global_step, self._run.state.skipped_steps
        if self._summed_at != place:
            self._write_sums("checkpoint")
        if self._file is None:
            return {"line": 0, "chain": ""}
        return {"line": self._file.lines, "chain": self._file.chain}

    def on_end(self, error: BaseException | None) -> None:
        if not self._is_started:
            return
        if error is None:
            self._flush()
            return
        with suppress(Exception):  # the error that ended the run has priority
            self._flush_after_error()

    @contextmanager
    def during(self) -> Iterator[None]:
        """Close the file at the end of the run, also if another run continues it at once."""
        try:
            yield
        finally:
            if self._file is not None:
                self._file.flush()
                self._file.close()

    def _flush(self) -> None:
        """Write the lines of finished windows.

        Processes: collective.

        Raises:
            StepDiffersError: A step was made again, and differs.
        """
        if not self._windows:
            return
        windows, own = self._take_windows()
        self._write_windows(windows, [own] if num_processes() == 1 else gather_from_data(own))
        self._require_same()

    def _flush_after_error(self) -> None:
        """Write the lines of windows that all processes have finished, as far as these report them now.

        The others may have failed elsewhere, so nothing collective is possible.
        """
        windows, own = self._take_windows()
        if not isinstance(self._run.watch, ProcessWatch) or num_processes() == 1:
            self._write_windows(windows, [own])
            return
        board = self._run.watch.board
        board.post(_PENDING, [[window.step, *one] for window, one in zip(windows, own, strict=True)])
        end = time.monotonic() + _WAIT_S
        while self._file is not None and len(found := board.read(_PENDING)) < board.count and time.monotonic() < end:
            time.sleep(_TICK_S)
        if self._file is None or len(found) < board.count:
            return
        of_data = each_once([found[index] for index in sorted(found)])
        first = max((own[0][0] for own in of_data if own), default=0)
        if all(own and own[0][0] == first for own in of_data):
            self._write_windows(windows, [[(*digests, pairs) for _, *digests, pairs in own] for own in of_data])

    def _take_windows(self) -> tuple[list[_Window], list[_Own]]:
        """Return the windows that are not written yet, with this process's samples, losses and weights in each."""
        windows, self._windows = self._windows, []
        end = windows[-1].end if windows else 0
        losses, weights = stack(self._losses[:end]).tolist() if end else [], _read(self._weights[:end])
        del self._losses[:end], self._weights[:end]
        own: list[_Own] = []
        begin = 0
        for window in windows:
            span = slice(begin, window.end)
            own.append((window.samples, window.content, list(zip(losses[span], weights[span], strict=True))))
            begin = window.end
        return windows, own

    def _write_windows(self, windows: Sequence[_Window], every: Sequence[Sequence[_Own]]) -> None:
        """Write the lines of windows; of those that some process has not finished, nothing."""
        file = self._file
        if file is None:
            return
        for window, of_all in zip(windows, zip(*every, strict=False), strict=False):
            orders = dict.fromkeys(str(order) for order, _, _ in of_all)
            samples = " ".join(orders) if orders.keys() != {"None"} else None  # one, unless each has its own data
            contents = sorted(chain.from_iterable(content.split() for _, content, _ in of_all))  # whoever had which
            content = xxhash.xxh3_64_hexdigest(" ".join(contents).encode())
            pairs = list(chain.from_iterable(pairs for _, _, pairs in of_all))
            if len(pairs) == 1:
                loss = pairs[0][0]
            else:
                total = exact_sum([weight for _, weight in pairs])
                loss = exact_sum([loss * weight for loss, weight in pairs]) / total if total else 0.0
            shown = f'"{samples}"' if samples is not None else "null"
            value = f'"{loss.hex()}"' if pairs else "null"
            body = (
                f'{{"step": {window.step}, "epoch": {window.epoch}, "batches": [{window.first}, {window.last}], '
                f'"samples": {shown}, "content": "{content}", "loss": {value}'
            )
            body += "" if window.made_step else ', "skipped": true'
            file.add_text(body)
            if self._before:
                self._compare(file, json.loads(body + "}"))
        file.flush()

    def _write_sums(self, at: str) -> None:
        """Write the checksums of the current weights and optimizer state, and of the gradients of the last step.

        Processes: collective.
        """
        run = self._run
        self._summed_at = run.state.global_step, run.state.skipped_steps
        parameters = plain_parameter_names(run.unwrapped_model)
        found = {"weights": self._sum(list(parameters.values())), "optimizer": self._sum_optimizer(parameters)}
        gradients, self._gradients = self._gradients, None
        if at == "step" and gradients is not None:
            found["gradients"] = gradients
        line: dict[str, Any] = {"step": run.state.global_step, "at": at}
        if self._file is None:
            self._require_same()
            return
        sums = {
            kind: {
                "all": f"{combine(self._names, found[kind]):016x}",
                "each": "".join(f"{one:016x}" for one in found[kind]),
            }
            for kind in KINDS
            if kind in found
        }
        self._file.add({**line, "sums": sums})
        if self._before:
            self._compare(self._file, {**line, "sums": sums})
        self._file.flush()
        self._require_same()

    def _sum(self, tensors: Sequence[torch.Tensor | None]) -> list[int]:
        """Return the checksums of whole tensors; on other processes than the main one only where they are sharded."""
        if any(is_dtensor(tensor) for tensor in self._run.unwrapped_model.parameters()):
            return add_over_processes(sums_of(tensors))
        return sums_of(tensors) if is_main_process() else []

    def _sum_optimizer(self, parameters: dict[str, Any]) -> list[int]:
        states = state_of(self._run.stepper.optimizer)
        entries = [sum_of_state(states.get(parameter, {})) for parameter in parameters.values()]
        tensors = [value for of_one in entries for _, value in of_one if isinstance(value, torch.Tensor)]
        # A tensor that is whole on every process counts once, as numbers do.
        sums = iter(self._sum([one if is_dtensor(one) or is_main_process() else None for one in tensors]))
        if not is_main_process():
            return []
        return [
            sum(factor * (next(sums) if isinstance(value, torch.Tensor) else value) for factor, value in of_one) % 2**64
            for of_one in entries
        ]

    # ---- Comparing

    def _compare(self, file: LedgerFile, line: dict[str, Any]) -> None:
        before = self._before.pop(key, None) if (key := key_of(line)) is not None else None
        found = None if before is None else find_difference(before, line, self._names)
        if found is None:
            return
        self._before = {}  # later steps differ too
        file.add({"differs": {"step": line["step"], "what": found, "because": self._changes}})
        if self._changes:
            what = f"step {line['step']} differs from the same step before the interruption: {found}"
            say_once(f"{what}; changed since: {', '.join(self._changes)}")
            return
        self._found = _report(line["step"], found, self._callbacks)

    def _require_same(self) -> None:
        if not self._is_comparing:
            return
        found, is_left = broadcast_object((self._found, bool(self._before)))
        self._found, self._is_comparing = None, is_left
        if found is None:
            return
        if self._options.on_difference == "warn":
            warn_once(str(found), about="repeated steps")
            return
        self._run.snapshot.invalidate()
        raise found


def _report(step: int, found: str, callbacks: Sequence[str]) -> StepDiffersError:
    got = f"its result differs from before the interruption. First difference: {found}"
    expected = "a bit-for-bit identical result: versions, hardware, processes, settings and code are unchanged"
    do = (
        "look for state that no checkpoint contains (trainer.check_resume finds it), data that change between reads, "
        'or faulty hardware; Trainer(ledger={"on_difference": "warn"}) continues'
    )
    if callbacks:
        do = f"check whether a callback changes what a step computes ({callbacks[0]}); {do}"
    return fail(StepDiffersError, f"step {step}, repeated after resuming", got=got, expected=expected, do=do)


def _read(weights: list[Weight]) -> list[float]:
    on_device = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    values = iter(stack(on_device).tolist() if on_device else ())
    return [next(values) if isinstance(weight, torch.Tensor) else float(weight) for weight in weights]
