"""Uploads the saved model to the Hugging Face Hub after the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from accmt.callbacks.callback import MainProcessCallback
from accmt.errors import ArgumentError, fail
from accmt.messages import say, warn
from accmt.secrets import remember

if TYPE_CHECKING:
    from huggingface_hub import HfApi


class PushToHub(MainProcessCallback):
    """Uploads the model folder, including its model card, when a run finishes, even if it was stopped early.

    The repository is created at the start of the run if it does not exist, so that a missing or insufficient token
    raises an error immediately, not after hours. If the Hub cannot be reached, accmt warns with the command to upload
    the folder, and the run continues. Other processes wait for the upload: if it takes longer than their timeout
    (`InitProcessGroupKwargs`), upload the folder after the run instead.

    Args:
        repo_id: The repository, "user/name"; it is created if it does not exist.
        private: Whether a new repository is private; None means the account's default.
        token: The access token; None means that of `hf auth login` or `HF_TOKEN`.
        revision: The branch; None means the main branch.
        endpoint: The Hub's URL, if it is not `HF_ENDPOINT` or huggingface.co.

    Raises:
        ArgumentError: At the start of the run: the Hub rejected the request, or huggingface_hub is offline.

    Processes: main only.

    Example:
        >>> from accmt import PushToHub, Trainer
        >>> trainer = Trainer("hps/bbc_news.yaml", "out/news", callbacks=PushToHub("user/news"))  # doctest: +SKIP
    """

    order = float("inf")

    def __init__(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        endpoint: str | None = None,
    ) -> None:
        self.repo_id = repo_id
        self._private = private
        remember({"token": token})
        self._token = token
        self._revision = revision
        self._endpoint = endpoint

    def on_fit_start(self) -> None:
        """Create the repository if it does not exist."""
        with self._noting_unreachable_hub("The run continues; accmt will try again at the end."):
            from huggingface_hub.errors import (
                HfHubHTTPError,
                HFValidationError,
                LocalTokenNotFoundError,
                OfflineModeIsEnabled,
            )

            try:
                self._api().create_repo(self.repo_id, private=self._private, exist_ok=True)
            except (HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled) as error:
                self._refuse(error, "name it user/name, log in with `hf auth login`, and unset HF_HUB_OFFLINE")
            except HfHubHTTPError as error:
                if error.response.status_code >= 500:
                    raise
                self._refuse(error, "log in with `hf auth login`, using a token with write access")

    def on_fit_end(self) -> None:
        """Upload the folder."""
        folder = self.trainer.settings.model_folder
        is_saved = self.trainer.run.saver.selection.has_saved or self.trainer.settings.saving.saves_last
        if not self.state.finished or not is_saved:
            return
        with self._noting_unreachable_hub(f"Upload it manually: hf upload {self.repo_id} {folder}"):
            api = self._api()
            api.upload_folder(
                repo_id=self.repo_id,
                folder_path=folder,
                revision=self._revision,
                ignore_patterns=[".*"],
                commit_message=f"accmt: {self.state.global_step} steps",
            )
            say(f"uploaded {folder} to {api.endpoint}/{self.repo_id}")

    def _api(self) -> HfApi:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self._endpoint, token=self._token)

    def _refuse(self, error: Exception, do: str) -> None:
        got = str(error).strip().partition("\n")[0] or type(error).__name__
        where, expected = f"PushToHub({self.repo_id!r})", "a repository with write access"
        raise fail(ArgumentError, where, got=got, expected=expected, do=do) from error

    @contextmanager
    def _noting_unreachable_hub(self, then: str) -> Iterator[None]:
        try:
            yield
        except ArgumentError:
            raise
        except Exception as error:  # noqa: BLE001 - network errors must not end a run
            warn(f"the Hub could not be reached for {self.repo_id}: {type(error).__name__}: {error}. {then}")
