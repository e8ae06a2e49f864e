"""Models in object storage: `Trainer(model_path="s3://bucket/models/news")`, or any other URL that fsspec understands.

Models are saved in a local folder. After each save, and at the end of the run, a thread uploads a copy of the whole
folder under a name of its own, as for checkpoints; its manifest goes last. Then the object `newest` is replaced, which
contains that name. So whoever reads `newest` first downloads a complete model.

The history of the run is uploaded with each model and checkpoint, and downloaded when the run resumes on an empty disk.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accmt.addons.remote_checkpoints import Lease, RemoteCheckpoint, RemoteFolder, Uploads, explaining, start_uploads
from accmt.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, write_manifest
from accmt.errors import ArgumentError, fail
from accmt.files import loads, write_text
from accmt.messages import say, warn
from accmt.processes import run_on_main_process
from accmt.run import EvaluationRun, Run
from accmt.run.features import Activity, Feature
from accmt.saving import RUN_KEY, ModelFolderClaim, read_status
from accmt.saving.model_folder import STATUS_NAME
from accmt.secrets import hide_text
from accmt.tracking.history import HISTORY_FILE

if TYPE_CHECKING:
    from accmt.module import AcceleratorModule
    from accmt.options import Settings

NEWEST = "newest"
"""The object that contains the name of the newest model."""

ORIGIN = ".remote_model.json"
"""In a local model folder: where its models are uploaded to, and of which run they are."""

_KEEP = 2
"""Models of a run that stay: somebody may be downloading the one before the newest."""


class RemoteModelFolder(RemoteFolder):
    """A folder of models in object storage.

    Args:
        url: Its URL.
        run_id: The run that uploads; models of other runs are not deleted.
        run_name: Its name.
        history: Its `history.jsonl`.
    """

    kind = "model"
    argument = "model_path"
    prefix = "model"
    advice_if_skipped = ""

    def __init__(self, url: str, run_id: str = "", run_name: str = "", history: Path | None = None) -> None:
        super().__init__(url)
        self._run_id = run_id
        self._run_name = run_name
        self.history = history

    def upload(self, folder: Path) -> str:
        """Upload a copy of a model folder unless it is the newest here, and replace `newest` and the history."""
        newest = next(iter(self.newest_first()), None)
        files = {path.as_posix(): FileEntry.of(folder / path) for path in _list_files(folder)}
        name = newest.name if newest is not None else ""
        if files and (newest is None or newest.manifest is None or newest.manifest.files != files):
            steps = [status["global_step"] for status in _statuses(folder)]
            manifest = Manifest.of_this_run(
                step=max(steps, default=0),
                sequence=1 + (newest.manifest.sequence if newest is not None and newest.manifest is not None else 0),
                files=files,
                info={"run_name": self._run_name, RUN_KEY: self._run_id},
            )
            write_manifest(folder, manifest)
            name = super().upload(folder)
        if name:
            self._write(NEWEST, name.encode())
        self.upload_others()
        return name

    def upload_others(self) -> None:
        """Upload the history."""
        if self.history is not None and self.history.is_file():
            self._write(self._history_key, self.history.read_bytes())

    def download_history(self) -> None:
        """Download the history, unless the local one has rows that the remote one does not have."""
        if self.history is None:
            return
        try:
            content = self._read(self._history_key)
        except FileNotFoundError:
            return
        own = self.history.read_bytes() if self.history.is_file() else b""
        if len(content) > len(own) and content.startswith(own):
            self.history.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.history, content.decode())

    @property
    def _history_key(self) -> str:
        return f"history/{self._run_name}.jsonl"

    def prune(self, keep: int) -> None:
        """Delete all complete models of this run but the newest `keep`."""
        for one in [one for one in self.newest_first() if _run_of(one) == self._run_id][keep:]:
            self.delete(one)


class RemoteModels(Feature):
    """Uploads the models of a run whose `model_path` is a URL, and brings the newest one back for a resume."""

    name = "remote_models"

    def __init__(self, run: Run, url: str) -> None:
        self._run = run
        self._url = url
        self._uploads: Uploads | None = None

    @classmethod
    def for_run(cls, run: EvaluationRun) -> RemoteModels | None:
        url = run.settings.saving.model_url
        if url is None or not isinstance(run, Run) or run.settings.running.fast_dev_run:
            return None
        return cls(run, url)

    @classmethod
    def check(cls, settings: Settings, module: AcceleratorModule, train_data: Any) -> None:
        """Check that models and checkpoints do not share a folder."""
        url, other = settings.saving.model_url, settings.checkpoints.url
        if url is not None and other is not None and url.rstrip("/") == other.rstrip("/"):
            do = f'checkpoint="{hide_text(other.rstrip("/"))}-checkpoints"'
            expected = "a URL for models, and another one for checkpoints"
            raise fail(
                ArgumentError, "Trainer(model_path=..., checkpoint=...)", got="the same URL", expected=expected, do=do
            )

    @classmethod
    def before_resume(cls, settings: Settings) -> Path | None:
        """Download the newest model if the local folder is empty, or has an older one of the same run."""
        url = settings.saving.model_url
        if url is not None and settings.checkpoints.resume is not False and not settings.running.fast_dev_run:
            run_on_main_process(partial(_bring, url, settings.model_folder))
        return None

    def on_start(self) -> None:
        """Take the lease, so that missing credentials or a second run are errors before training."""
        run = self._run
        outdated = run_on_main_process(self._start)
        for best in run.saver.selection.forget(lambda rule: rule not in outdated):
            folder = run.settings.model_folder
            warn(f"{folder} has an older model than the best by {best}: the next evaluation counts as the best")

    def _open(self) -> RemoteModelFolder:
        run = self._run
        history = run.tracking.run_folder.absolute() / HISTORY_FILE
        with explaining(self._url, RemoteModelFolder):
            return RemoteModelFolder(self._url, run.saver.run_id, run.tracking.run_name, history)

    def _bring_history(self) -> None:
        with explaining(self._url, RemoteModelFolder):
            self._open().download_history()

    def _start(self) -> list[str]:
        """Take the lease. Returns the rules whose best model was lost: their checkpoint was uploaded, the model not."""
        run, remote = self._run, self._open()
        folder, run_name = run.settings.model_folder.absolute(), run.tracking.run_name
        origin = {RUN_KEY: run.saver.run_id, "run_name": run_name, "history": str(remote.history)}
        self._uploads = start_uploads(remote, folder, ORIGIN, origin, run_name=run_name, keep=_KEEP)
        selection, outdated = run.saver.selection, []
        for rule in selection.names:
            saved_at = selection.saved_at(rule)
            with suppress(OSError, ValueError, KeyError):
                if saved_at is not None and read_status(selection.folder(folder, rule))["global_step"] < saved_at:
                    outdated.append(rule)
        return outdated

    @contextmanager
    def during_activity(self, activity: Activity) -> Iterator[None]:
        yield
        if activity == "saving":
            self._upload()

    def _upload(self) -> None:
        if self._uploads is None:
            return
        try:
            self._uploads.add(self._run.settings.model_folder)
        except OSError as error:  # the model is saved; only its copy for the upload is not
            warn(f"the model is not uploaded to {hide_text(self._url)} now: {error}")

    def on_checkpoint(self, folder: Path) -> None:
        """Upload the history, so that a run that resumes from this checkpoint elsewhere has its rows."""
        if self._uploads is not None:
            self._uploads.add_others()

    @contextmanager
    def during(self) -> Iterator[None]:
        """Bring the history back before it is opened; upload it with the model at the end of the run."""
        if self._run.is_resumed:
            run_on_main_process(self._bring_history)
        try:
            yield
        finally:
            if self._uploads is not None:
                self._upload()
                self._uploads.close()
                self._uploads = None


def upload_rest(folder: Path, *, url: str | None = None) -> str | None:
    """Upload the model of a local folder and the history of its run, unless they are in the remote folder.

    Args:
        folder: The local model folder.
        url: The remote folder; None is the one that the run used. Needed if that has a password, which is not stored.

    Returns:
        The name of the uploaded model; None if nothing was left to upload.

    Raises:
        CheckpointError: A run is still writing there.
    """
    origin = loads((folder / ORIGIN).read_text(encoding="utf-8"))
    url = url or origin["url"]
    with explaining(url, RemoteModelFolder):
        remote = RemoteModelFolder(url, origin[RUN_KEY], origin["run_name"], Path(origin["history"]))
        with Lease(remote, origin["run_name"]):
            before = [one.name for one in remote.newest_first()]
            with tempfile.TemporaryDirectory(prefix=".upload-", dir=folder) as place:
                copy = Path(place) / "model"
                shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".*"))
                name = remote.upload(copy)
            remote.prune(_KEEP)
            return None if name in before else name


def _bring(url: str, folder: Path) -> None:
    with explaining(url, RemoteModelFolder):
        remote = RemoteModelFolder(url)
        newest = next(iter(remote.newest_first()), None)
        if newest is None or newest.manifest is None:
            return
        local = list(_statuses(folder))
        is_of_another = any(status.get(RUN_KEY) != _run_of(newest) for status in local)
        if is_of_another or newest.manifest.step <= max((status["global_step"] for status in local), default=-1):
            return
        say(f"downloading {remote.shown}/{newest.name} to {folder}")
        claim = ModelFolderClaim.take(folder)
        try:
            with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as place:
                remote.fetch(newest, Path(place))
                # Status files go last: they say which model is in the folder.
                for path in sorted(newest.manifest.files, key=lambda path: Path(path).name == STATUS_NAME):
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    (Path(place) / path).replace(folder / path)
        finally:
            if claim is not None:
                claim.release()


def _run_of(one: RemoteCheckpoint) -> str:
    return "" if one.manifest is None else str(one.manifest.info.get(RUN_KEY))


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a model folder, relative to it."""
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        is_ours = inner.name == MANIFEST_NAME or any(part.startswith(".") for part in inner.parts)
        if path.is_file() and not is_ours:
            yield inner


def _statuses(folder: Path) -> Iterator[dict[str, Any]]:
    for path in _list_files(folder):
        if path.name == STATUS_NAME:
            with suppress(OSError, ValueError):
                yield read_status((folder / path).parent)
