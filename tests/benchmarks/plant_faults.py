"""Plants one fault at a time in a copy of this checkout, and says which the tests catch.

    python tests/benchmarks/plant_faults.py              # all of them: a few minutes
    python tests/benchmarks/plant_faults.py order secret # those with one of these words in their name or file
    python tests/benchmarks/plant_faults.py --list       # only look whether each still has its place in accmt/

A change of the test suite must leave every fault caught. A fault is found by its text in all of `accmt/`, so files may
move; one whose text is not there exactly once is an error, and needs a new text. `--base FOLDER` takes the code of
another checkout, and the tests of this one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "build", "out", "mlruns")


@dataclass(frozen=True)
class Fault:
    """One line that is wrong.

    Attributes:
        subject: What it breaks.
        right: A text that is in `accmt/` once.
        wrong: What takes its place.
        tests: The files that catch it, from `tests/`, and after "-k" a choice of their tests.
    """

    subject: str
    right: str
    wrong: str
    tests: str


FAULTS = [
    # What a checkpoint contains of the user's objects.
    Fault(
        "state: a changed attribute is not stored",
        "if name not in before or before[name].digest != look.digest",
        "if name not in before",
        "resume/test_attributes.py -k goes_on",
    ),
    Fault(
        "state: an emergency checkpoint has half a step",
        "names = self._latest.keys() if compares else self.changed",
        "names = set()",
        "resume/test_attributes.py -k emergency",
    ),
    Fault(
        "state: weights changed within a step are saved",
        "return bool(self._writes) and self._writes != list(map(_VERSION, self._weights))",
        "return False",
        "resume/test_attributes.py -k emergency",
    ),
    Fault(
        "state: buffers that are not persistent are left out",
        'restore_non_persistent_buffers(model, loaded["buffers"])',
        "pass",
        "resume/test_attributes.py -k buffers",
    ),
    Fault(
        "state: a sampler draws a resumed epoch from its later state",
        'resumed.load_state_dict(deepcopy(self._saved["drawn"]))',
        "pass",
        "resume/test_attributes.py -k sampler",
    ),
    Fault(
        "state: what cannot be stored is lost in silence",
        "self._name_unstorable(name, values[name])",
        "pass",
        "resume/test_attributes.py -k named",
    ),
    Fault(
        "state: each process gets the main process's",
        'if part.scope == "process"}',
        'if part.scope == "none"}',
        "distributed/test_hidden_state.py",
    ),
    Fault(
        "state: the evaluation before training changes attributes",
        "with without_trace(run.unwrapped_model), run.attributes.keeping(unchanged=True):",
        "with without_trace(run.unwrapped_model):",
        "resume/test_attributes.py -k evaluation",
    ),
    # Which samples, in which order.
    Fault("order: a rest is not shared", "min(rank, extra)", "0", "unit/test_data_sharding.py"),
    Fault("order: one seed for all purposes", "zlib.crc32(purpose.encode())", "0", "unit/test_data_seeding.py"),
    Fault(
        "order: the same in each epoch",
        'torch.Generator().manual_seed(derive_seed(self._seed, "order", epoch))',
        'torch.Generator().manual_seed(derive_seed(self._seed, "order", 0))',
        "unit/test_data_samplers.py",
    ),
    Fault(
        "order: a batch's seed is that of its process",
        "BatchIndices(indices, derive_seed(self._seed, self._purpose, epoch, part.start))",
        "BatchIndices(indices, derive_seed(self._seed, self._purpose, epoch, 0))",
        "unit/test_data_samplers.py unit/test_data_planned.py",
    ),
    Fault(
        "order: a row of any number of samples",
        "if left and len(rows[row]) < budget.max_samples:",
        "if left:",
        "unit/test_data_packing.py",
    ),
    Fault(
        "order: documents learn from one another",
        'document["labels"][:1] = IGNORED',
        'document["labels"][:0] = IGNORED',
        "unit/test_data_packing.py",
    ),
    # What a window weighs.
    Fault(
        "weights: processes are forgotten",
        "return weight * self._num_data_processes / (window.known_samples or 1)",
        "return weight / (window.known_samples or 1)",
        "distributed/test_windows.py -k 3-processes",
    ),
    Fault(
        "weights: the reference is of the window before",
        "factor = self._num_data_processes * self.reference / total",
        "factor = self._num_data_processes / total",
        "distributed/test_windows.py -k 3-processes",
    ),
    Fault(
        "weights: gradients are summed", "flat.div_(num_processes())", "flat.div_(1)", "distributed/test_containers.py"
    ),
    Fault(
        "weights: clipped to twice the value",
        "nn.utils.clip_grad_value_(members, limit)",
        "nn.utils.clip_grad_value_(members, 2 * limit)",
        "unit/test_loop_fit.py unit/test_loop_scaler.py resume/test_resume.py",
    ),
    Fault(
        "weights: a loss by its weight alone",
        "return weight / self.reference",
        "return weight",
        "unit/test_loop_weighting.py distributed/test_windows.py -k weight or 1-processes",
    ),
    # Where an interrupted run goes on.
    Fault(
        "resume: another order is not seen",
        'if start.position["order"] != order:',
        'if start.position["order"] == "":',
        "unit/test_data_position.py",
    ),
    Fault(
        "resume: samples are read again",
        "num_samples=start.consumed + num_left, first_micro_batch=start.micro_batch, first_sample=start.consumed",
        "num_samples=start.consumed + num_left, first_micro_batch=start.micro_batch, first_sample=0",
        "unit/test_data_position.py",
    ),
    Fault(
        "resume: other samples are not seen",
        'if result == "different" and is_in_epoch:',
        'if result == "" and is_in_epoch:',
        "distributed/test_alike.py",
    ),
    Fault(
        "resume: a stage runs twice",
        "        following = index + 1",
        "        following = index",
        "unit/test_loop_stages.py resume/test_robustness.py",
    ),
    Fault(
        "resume: the scheduler is a step behind",
        "        for _ in range(steps):\n            scheduler.step()",
        "        for _ in range(steps - 1):\n            scheduler.step()",
        "unit/test_optimization_resuming.py",
    ),
    Fault(
        "resume: a new rate forgets what lowered the old one",
        '        if "lr" in changed:  # lowered',
        "        if False:  # lowered",
        "unit/test_optimization_resuming.py",
    ),
    # Whether a checkpoint is there after whatever happens.
    Fault(
        "checkpoint: a new name before its content",
        "        fsync_file(temporary)\n",
        "",
        "unit/test_files_atomic.py",
    ),
    Fault(
        "checkpoint: the rename is not durable",
        "    fsync_folder(folder)  # before",
        "    pass  # before",
        "unit/test_checkpoint_store.py faults/test_checkpoint_store_faults.py",
    ),
    Fault(
        "checkpoint: a process's failure is not seen",
        "    if failures:\n        return Part(",
        "    if not parts:\n        return Part(",
        "unit/test_checkpoint_store.py distributed/test_checkpoint_store.py",
    ),
    Fault(
        "checkpoint: one more is kept",
        "num_kept=self._num_kept)",
        "num_kept=self._num_kept + 1)",
        "unit/test_checkpoint_store.py",
    ),
    Fault("checkpoint: the oldest is taken", "key=_age, reverse=True)", "key=_age)", "unit/test_checkpoint_store.py"),
    Fault(
        "checkpoint: changed bytes are not seen",
        "elif entry != expected:",
        "elif not entry:",
        "unit/test_checkpoint_manifest.py unit/test_checkpoint_store.py",
    ),
    Fault(
        "checkpoint: of another run while one writes",
        "raise FolderTakenError(holder) from None",
        "return None",
        "unit/test_files_locks.py unit/test_checkpoint_store.py",
    ),
    # What is measured.
    Fault(
        "metrics: weights are counted, not used",
        "totals.append(value * weight)",
        "totals.append(value)",
        "unit/test_metrics_running_averages.py",
    ),
    Fault(
        "metrics: not in the data's order",
        "        if are_shared:\n            # P",
        "        if not parts:\n            # P",
        "unit/test_metrics_gathering.py distributed/test_metrics.py",
    ),
    Fault("metrics: the root is not drawn", '{"squared": False}', '{"squared": True}', "unit/test_metrics_builtin.py"),
    Fault(
        "metrics: an evaluation too many at the end",
        "is_new = state.last_evaluation_step != state.global_step and",
        "is_new = state.last_evaluation_step != -1 and",
        "unit/test_loop_cadence.py",
    ),
    # Which model is the best.
    Fault(
        "best: a threshold counts as passed",
        "self.lower.get(quantity.label, -math.inf) < quantity.read(values) <",
        "self.lower.get(quantity.label, -math.inf) <= quantity.read(values) <",
        "unit/test_saving_selection.py",
    ),
    Fault(
        "best: NaN is better",
        "            if not math.isfinite(value):\n                return False",
        "            if False:\n                return False",
        "unit/test_saving_selection.py unit/test_saving_rules.py",
    ),
    Fault(
        "best: a model that is gone stays the best",
        "            for key in rule.keys:\n                self.best.pop(key, None)",
        "            for key in ():\n                self.best.pop(key, None)",
        "unit/test_saving_selection.py unit/test_loop_selection.py",
    ),
    # What must not be written.
    Fault(
        "secrets: the end of a long one stays",
        "_secrets_of_command(tuple(sys.argv)), key=len, reverse=True)",
        "_secrets_of_command(tuple(sys.argv)), key=len)",
        "unit/test_secrets.py",
    ),
    Fault(
        "secrets: those under a key",
        "hidden[key] = HIDDEN if is_secret else",
        "hidden[key] = HIDDEN if False else",
        "unit/test_secrets.py",
    ),
    # Ends.
    Fault(
        "signals: processes leave at different points",
        "for note in notes.values()) + 1, reason",
        "for note in notes.values()), reason",
        "unit/test_failures_interruption.py",
    ),
    Fault(
        "signals: one is lost where training was asked to finish",
        'if self._request is None or (self._request.ending == "finish" != reason.ending):',
        "if self._request is None:",
        "unit/test_failures_interruption.py",
    ),
    # What trackers get.
    Fault(
        "trackers: rows of a killed process are lost",
        "self.delivered = min(self.delivered, self.settled)",
        "self.delivered = max(self.delivered, self.settled)",
        "unit/test_addons_trackers_delivery_state.py",
    ),
    Fault("trackers: one row stops all", "feed.skip_first(error)", "raise", "faults/test_tracking_delivery.py"),
    # Processes that part ways.
    Fault(
        "replicas: never compared",
        "return self._equal_at < self._first_step + 2",
        "return False",
        "distributed/test_replicas.py",
    ),
    Fault(
        "replicas: differences pass",
        "                if theirs != value:\n",
        "                if theirs is None:\n",
        "distributed/test_replicas.py",
    ),
    # Losses that are wrong.
    Fault(
        "losses: a spike is any loss",
        "return mean + self._spike_guard * math.sqrt(variance)",
        "return mean",
        "unit/test_features_loss_guard.py",
    ),
    Fault(
        "losses: a step with gradients that are not finite",
        "is_finite = bool(torch.isfinite(total_norm(gradients)))",
        "is_finite = True",
        "unit/test_features_loss_guard.py",
    ),
    # Options.
    Fault(
        "options: true is a number",
        "config = ConfigDict(strict=True, extra=extra",
        "config = ConfigDict(strict=False, extra=extra",
        "unit/test_options_checks.py unit/test_options_settings.py",
    ),
    Fault(
        "options: logs a step late",
        "state.global_step % self.log_every == 0",
        "state.global_step % self.log_every == 1",
        "unit/test_loop_cadence.py",
    ),
    Fault(
        "options: a fraction of any size",
        "if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:",
        "if isinstance(value, bool) or not isinstance(value, int | float):",
        "unit/test_options_grouping.py",
    ),
    # What users turn on.
    Fault(
        "averages: no warm-up",
        "decay = min(decay, (1 + self.num_averaged) / (10 + self.num_averaged))",
        "decay = min(decay, 1.0)",
        "unit/test_callbacks_averaging.py",
    ),
    Fault(
        "streams: each process reads all",
        "positions = Plan(size, batch_size, shard).local_indices(0)",
        "positions = Plan(size, batch_size, Shard(0, 1)).local_indices(0)",
        "unit/test_data_streams.py unit/test_data_sequential.py",
    ),
    Fault(
        "streams: the position before the batch",
        'position = {**constant, "samples": consumed, **self._state.take()}',
        'position = {**constant, "samples": consumed - size, **self._state.take()}',
        "unit/test_data_streams.py unit/test_data_sequential.py",
    ),
    Fault(
        "samples: those that cannot be read have weight",
        "own_read = (micro_batch.own_samples or 0) - len(micro_batch.bad)",
        "own_read = micro_batch.own_samples or 0",
        "unit/test_data_bad_samples.py unit/test_features_bad_samples.py",
    ),
    Fault(
        "data: reloaded in each epoch",
        "return epoch - epoch % settings.reload_epochs",
        "return epoch",
        "unit/test_setup_dataloaders.py unit/test_setup_user_data.py unit/test_unusual_settings.py",
    ),
    Fault(
        "tuning: prompts are trained on",
        "labels.append(token if is_target else IGNORED)",
        "labels.append(token)",
        "unit/test_addons_sft_chat.py",
    ),
    Fault(
        "preferences: the rejected answer wins",
        "logits = beta * (chosen - rejected)",
        "logits = beta * (rejected - chosen)",
        "unit/test_addons_prefer.py",
    ),
    Fault(
        "watch: a slow process is a deadlock",
        "return self._is_ahead_of(stand) and stand._is_ahead_of(self)",
        "return self._is_ahead_of(stand) or stand._is_ahead_of(self)",
        "unit/test_failures_waits.py",
    ),
    Fault(
        "ledger: positions do not count",
        "return _add_run(_bits(tensor), 0)",
        "return [_bits(tensor).sum()]",
        "unit/test_addons_flight_recorder.py unit/test_cli_diff.py",
    ),
    Fault(
        "ledger: names do not count",
        "return sum((_digest(name) | 1) * one for name, one in zip(names, sums, strict=True)) & _MASK",
        "return sum(one for name, one in zip(names, sums, strict=True)) & _MASK",
        "unit/test_addons_flight_recorder.py unit/test_cli_diff.py",
    ),
    Fault(
        "same bits: seeds follow the process",
        "unit=ranges[rank].start,",
        "unit=None,",
        "unit/test_addons_same_bits.py",
    ),
    Fault(
        "same bits: units are added one by one",
        "while self._sums and self._sums[-1][0] == size:",
        "while self._sums:",
        "unit/test_addons_same_bits.py",
    ),
    Fault(
        "same bits: processes are added one by one",
        "parts = [parts[index] + parts[index + 1] for index in range(0, len(parts), 2)]",
        "parts = [sum(parts[1:], parts[0])]",
        "unit/test_addons_same_bits.py",
    ),
    Fault(
        "same bits: the norm is torch's",
        "total_norm = staticmethod(total_norm)",
        "pass",
        "distributed/test_same_bits.py",
    ),
    Fault(
        "same bits: results are in the order of processes",
        "layout = layout._replace(is_interleaved=True)",
        "pass",
        "distributed/test_same_bits.py",
    ),
    Fault(
        "same bits: a short last batch has all units",
        "num_units = min(layout.num_units, self.num_micro_batches - batch)",
        "num_units = layout.num_units",
        "unit/test_addons_same_bits.py",
    ),
    Fault(
        "same bits: zeros have a sign",
        "else gradient.add_(0.0)",
        "else gradient",
        "unit/test_addons_same_bits.py",
    ),
]


def find(fault: Fault, root: Path) -> Path:
    """Return the file with the line that a fault changes.

    Raises:
        SystemExit: There is none, or more than one.
    """
    found = {path: path.read_text().count(fault.right) for path in (root / "accmt").rglob("*.py")}
    places = [path for path, number in found.items() if number]
    if [found[path] for path in places] != [1]:
        where = ", ".join(str(path.relative_to(root)) for path in places) or "nowhere"
        raise SystemExit(f"{fault.subject}: its text is not in accmt/ once, but {where}: {fault.right!r}")
    return places[0]


def run(fault: Fault, copy: Path, output: Path) -> int:
    """Plant a fault, run its tests in a fork, and take it out again; return pytest's exit code."""
    path = find(fault, copy)
    before = path.read_text()
    path.write_text(before.replace(fault.right, fault.wrong))
    try:
        process = os.fork()
        if process == 0:
            try:
                _run_tests(fault, copy, output)
            except BaseException:  # noqa: BLE001 - else the fork would go on as this process does
                traceback.print_exc()
            os._exit(98)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    finally:
        path.write_text(before)


def _run_tests(fault: Fault, copy: Path, output: Path) -> None:
    import pytest

    with output.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.setsid()
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ.update(PYTHONPATH=str(copy), OMP_NUM_THREADS="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    sys.dont_write_bytecode = True
    files, _, chosen = fault.tests.partition(" -k ")
    arguments = [str(copy / "tests" / name) for name in files.split()] + (["-k", chosen] if chosen else [])
    code = pytest.main(
        ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-p", "xdist", "-p", "pytest_timeout", *arguments]
    )
    import accmt

    is_copy = Path(accmt.__file__).is_relative_to(copy)
    sys.stdout.flush()
    os._exit(code if is_copy else 99)


def main() -> None:
    """Plant what the command line chooses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only faults with one of these in their name or test file")
    parser.add_argument("--list", action="store_true", help="look for the places only")
    parser.add_argument("--base", type=Path, default=ROOT, help="the checkout with the code")
    options = parser.parse_args()
    chosen = [
        fault for fault in FAULTS if not options.words or any(w in fault.subject + fault.tests for w in options.words)
    ]
    for fault in chosen:
        place = find(fault, options.base).relative_to(options.base)
        missing = [name for name in fault.tests.partition(" -k ")[0].split() if not (ROOT / "tests" / name).exists()]
        if missing:
            raise SystemExit(f"{fault.subject}: there is no {missing}")
        if options.list:
            print(f"{fault.subject:50} {place}")
    if options.list:
        return
    import pytest  # noqa: F401 - what follows is there in each fork
    import transformers.optimization  # noqa: F401

    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy, output = Path(folder).resolve() / "copy", Path(folder) / "output"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT, symlinks=True)
        if options.base != ROOT:
            shutil.rmtree(copy / "accmt")
            shutil.copytree(options.base / "accmt", copy / "accmt", ignore=LEFT_OUT)
        subprocess.run(["git", "init", "-q"], cwd=copy, check=False)
        for fault in chosen:
            code = run(fault, copy, output)
            printed = output.read_text(errors="replace").strip().splitlines()
            failed = next((line for line in printed if line.startswith(("FAILED", "ERROR"))), "".join(printed[-1:]))
            missed += code != 1
            print(f"{'caught' if code == 1 else f'MISSED ({code})'}  {fault.subject:50} {failed[:160]}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
