"""Checkpoints in object storage: a real S3 protocol (moto), with each request failing in each way in turn."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from werkzeug.serving import WSGIRequestHandler, make_server

from accmt import Callback, read_history
from accmt.addons import remote_checkpoints
from accmt.addons.inspection import inspect
from accmt.addons.remote_checkpoints import Lease, RemoteFolder, download
from accmt.addons.remote_models import NEWEST, RemoteModelFolder
from accmt.checkpoint.manifest import Manifest, read_manifest, write_manifest
from accmt.checkpoint.retention import KEEP_EVERY
from accmt.checkpoint.store import CheckpointStore
from accmt.cli.main import main
from accmt.errors import CheckpointError
from accmt.options.units import Every
from tests.checkpoints import save_with
from tests.launching import launch, run_together
from tests.object_storage.leases import LeaseTests
from tests.object_storage.runs import URL, steps_in, train
from tests.toys import Linear

ON_HOSTS = Path(__file__).parent / "train_on_hosts.py"
FILES_PER_CHECKPOINT = 3
NEVER = 10**9


class Proxy:
    """Stands before the store, and does something else with some of its requests.

    Attributes:
        fault: What: "error" answers 500 before the store sees the request, "lost" after the store has carried it out,
            "twice" carries it out twice, "cut" leaves out the second half of what a GET returns, "read-only" denies all
            but reading.
        first, last: With which requests, counted from 0.
        count: How many there have been.
        downloads: The objects that were read: the host that read it, and its name without the digits of the digest.
    """

    def __init__(self, store: Callable[..., Any]) -> None:
        self._store = store
        self.reset()

    def reset(self, fault: str = "", first: int = NEVER, last: int = NEVER) -> None:
        self.fault, self.first, self.last, self.count = fault, first, last, 0
        self.downloads: list[tuple[str, str]] = []

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        number, self.count = self.count, self.count + 1
        agent = re.search(r"app/(host-\d)", environ.get("HTTP_USER_AGENT", ""))
        name = re.search(r"(step-\d{8})-\w{8}(/.+)", environ["PATH_INFO"])
        if agent and name and environ["REQUEST_METHOD"] == "GET":
            self.downloads.append((agent[1], name[1] + name[2]))
        if not self.first <= number <= self.last:
            return self._store(environ, start_response)
        if self.fault == "error":
            return self._fail(start_response)
        if self.fault == "read-only" and environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return self._fail(start_response, "403 Forbidden", b"<Error><Code>AccessDenied</Code></Error>")
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        answers = [self._carry_out(environ, body) for _ in range(2 if self.fault == "twice" else 1)]
        if self.fault == "lost":
            return self._fail(start_response)
        status, headers, content = answers[-1]
        if self.fault == "cut" and environ["REQUEST_METHOD"] == "GET":
            content = content[: len(content) // 2]
            headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        start_response(status, headers)
        return [content]

    def _carry_out(self, environ: dict[str, Any], body: bytes) -> tuple[str, list[Any], bytes]:
        import io

        answer: list[Any] = []
        parts = self._store({**environ, "wsgi.input": io.BytesIO(body)}, lambda *given: answer.extend(given))
        return answer[0], answer[1], b"".join(parts)

    def _fail(
        self, start_response: Callable[..., Any], status: str = "500 Internal Server Error", body: bytes = b""
    ) -> Any:
        start_response(status, [("Content-Length", str(len(body)))])
        return [body]


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        """Log no requests."""


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    from moto.server import DomainDispatcherApplication, create_backend_app

    proxy = Proxy(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, proxy, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, name="asyncio-moto")
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "planted-secret-value")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        fsspec.filesystem("s3").clear_instance_cache()
        yield proxy
        fsspec.filesystem("s3").clear_instance_cache()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def bucket(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the file system of an empty bucket; pauses between attempts take no time."""
    monkeypatch.setattr(remote_checkpoints, "_FIRST_PAUSE_S", 0.0)
    files = fsspec.filesystem("s3", use_listings_cache=False)
    files.mkdir("bucket")
    yield files
    proxy.reset()
    files.rm("bucket", recursive=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The checkpoints of four steps."""
    folder = tmp_path_factory.mktemp("saved")
    train(folder=str(folder / "model"), checkpoint=None, checkpoint_options={"max_checkpoints": 4})
    return sorted((folder / "checkpoint-model").glob("step-*"))


def test_a_run_whose_disk_is_wiped_goes_on_where_it_was(bucket: Any) -> None:
    whole = train(epochs=4, folder="out/whole", checkpoint=None)
    train(epochs=2)
    assert steps_in(RemoteFolder(URL)) == [4]
    shutil.rmtree("out")
    resumed = train(epochs=4)
    assert torch.equal(resumed.model.weight, whole.model.weight)
    assert steps_in(RemoteFolder(URL)) == [8]
    assert not bucket.exists("bucket/run/lease.json")


def test_the_history_continues_on_an_empty_disk(bucket: Any) -> None:
    def values(folder: str) -> list[tuple[int, Any]]:
        return [(row["step"], row["values"]) for row in read_history(Path("logs") / folder) if "values" in row]

    settings = {"run_name": "run", "log_every": 1, "log_with": None}
    train(epochs=4, folder="out/whole", checkpoint=None, **settings)
    train(epochs=2, folder=f"{URL}-models", **settings)
    for folder in ("out/run-models", "out/checkpoint-run-models", "logs/run-models"):
        shutil.rmtree(folder, ignore_errors=True)
    train(epochs=4, folder=f"{URL}-models", **settings)
    assert [step for step, _ in values("run-models/run")] == [step for step, _ in values("whole/run")]
    assert (
        bucket.cat_file("bucket/run-models/history/run.jsonl") == Path("logs/run-models/run/history.jsonl").read_bytes()
    )


def test_the_newest_of_both_places_is_taken(bucket: Any, caplog: pytest.LogCaptureFixture) -> None:
    train(epochs=1)
    shutil.copytree("out", "elsewhere")
    train(epochs=2)
    shutil.rmtree("out")
    Path("elsewhere").rename("out")  # an older local folder
    caplog.clear()
    train(epochs=3)
    assert "downloading s3://bucket/run/step-00000004" in caplog.text
    remote = RemoteFolder(URL)
    remote.delete(remote.checkpoints()[0])  # an upload that never happened: the local one is newer
    caplog.clear()
    train(epochs=4)
    assert "downloading" not in caplog.text
    assert "step 6" in caplog.text
    assert steps_in(remote) == [8]


def test_another_run_resumes_from_a_url(bucket: Any) -> None:
    train(epochs=1)
    before = bucket.find("bucket")
    other = Linear()
    train(other, epochs=2, folder="out/other", checkpoint=None, resume=URL)
    assert torch.equal(other.model.weight, train(epochs=2, folder="out/whole", checkpoint=None).model.weight)
    assert bucket.find("bucket") == before
    assert inspect(Path("out/checkpoint-other.resumed"))[0].is_complete


def test_max_checkpoints_and_pins_hold_in_the_store(bucket: Any, saved: list[Path]) -> None:
    remote = RemoteFolder(URL)
    for number, folder in enumerate(saved):
        copy = Path(shutil.copytree(folder, folder.name))
        if number == 0:
            (copy / "PINNED").touch()
        remote.upload(copy)
        remote.prune(2)
    assert steps_in(remote) == [1, 3, 4]


@pytest.mark.parametrize("pin", ["", KEEP_EVERY, None])
def test_a_step_that_is_saved_again_stays_once_unless_a_user_pinned_it(
    bucket: Any, saved: list[Path], pin: str | None
) -> None:
    remote = RemoteFolder(URL)
    for sequence, (step, pins) in enumerate([(1, pin), (2, None), (1, pin), (2, None)], start=1):
        copy = Path(shutil.copytree(saved[step - 1], f"{sequence}"))
        manifest = read_manifest(copy)
        assert isinstance(manifest, Manifest)
        write_manifest(copy, replace(manifest, sequence=sequence))
        if pins is not None:
            (copy / "PINNED").write_text(pins)
        remote.upload(copy)
        remote.prune(2)
    assert steps_in(remote) == ([1, 1, 2] if pin == "" else [1, 2])


def test_the_newest_counts_even_if_it_is_pinned(bucket: Any, saved: list[Path], tmp_path: Path) -> None:
    """As in the local folder."""
    remote, store = RemoteFolder(URL), CheckpointStore(tmp_path, max_checkpoints=2, keep_every=Every(1, "epoch"))
    for step in (1, 2, 3, 4):
        info = {"epoch": step // 4, "epochs_done": step // 4, "global_step": step, "run_name": "run"}
        remote.upload(save_with(store, step, lambda folder: (folder / "x").write_text("x") and None, info))
        remote.prune(2)
        local = [one.manifest.step for one in inspect(tmp_path) if one.manifest]
        assert steps_in(remote) == local
    assert local == [3, 4]
    assert (tmp_path / "step-00000004" / "PINNED").exists()


@pytest.mark.parametrize("fault", ["error", "lost", "twice", "cut"])
def test_each_request_in_turn_may_fail_once(bucket: Any, proxy: Proxy, saved: list[Path], fault: str) -> None:
    proxy.reset()
    first = RemoteFolder("s3://bucket/whole")
    first.upload(saved[0])
    first.prune(1)
    download(lambda: first, first.newest_first()[0], Path("whole"))
    requests = proxy.count
    assert requests > 3 * FILES_PER_CHECKPOINT
    for number in range(requests):
        remote, folder = RemoteFolder(f"s3://bucket/{fault}-{number}"), Path(f"{fault}-{number}")
        proxy.reset(fault, number, number)
        remote.upload(saved[0])
        remote.prune(1)
        newest = remote.newest_first()
        proxy.reset(fault, 0, 0)
        assert inspect(download(lambda remote=remote: remote, newest[0], folder))[0].is_complete
        proxy.reset()
        assert steps_in(remote) == [1]


def test_the_store_may_go_away_at_each_request(bucket: Any, proxy: Proxy, saved: list[Path]) -> None:
    """What a kill leaves is the same: nothing is cleaned up."""
    number, is_done = 0, False
    while not is_done:
        remote = RemoteFolder(f"s3://bucket/away-{number}")
        remote.upload(saved[0])
        proxy.reset("error", number, NEVER)
        try:
            remote.upload(saved[1])
            remote.prune(1)
            is_done = proxy.count <= number
        except OSError:
            pass
        proxy.reset()
        assert steps_in(remote)[-1] in (1, 2)
        newest = remote.newest_first()[0]
        assert inspect(download(lambda remote=remote: remote, newest, Path(f"away-{number}")))[0].is_complete
        remote.clean()
        assert all(not one.problem for one in remote.checkpoints())
        remote.upload(saved[2])
        remote.prune(1)
        assert steps_in(remote) == [3]
        number += 1
    assert number > FILES_PER_CHECKPOINT


def make_models() -> list[Path]:
    """Make three model folders of two files each."""
    folders = [Path(f"local-{number}") for number in range(3)]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
        (folder / "model.safetensors").write_text(f"weights of {folder.name}" * 100)
    return folders


def download_model(bucket: Any, url: str, into: Path) -> str:
    """Download the newest model as the docs say, and return which of `make_models` it is; it must be whole."""
    root = url.removeprefix("s3://")
    bucket.get(f"{root}/{bucket.cat_file(f'{root}/{NEWEST}').decode()}/", f"{into}/", recursive=True)
    name = (into / "config.json").read_text()
    assert (into / "model.safetensors").read_text() == f"weights of {name}" * 100
    return name


def test_the_store_may_go_away_at_each_request_for_a_model(bucket: Any, proxy: Proxy) -> None:
    """What a kill leaves is the same: nothing is cleaned up."""
    models, number, is_done = make_models(), 0, False
    while not is_done:
        url = f"s3://bucket/models-away-{number}"
        remote = RemoteModelFolder(url)
        remote.upload(models[0])
        proxy.reset("error", number, NEVER)
        try:
            remote.upload(models[1])
            remote.prune(1)
            is_done = proxy.count <= number
        except OSError:
            pass
        proxy.reset()
        assert download_model(bucket, url, Path(f"away-{number}")) in ("local-0", "local-1")
        remote.clean()
        remote.upload(models[2])
        remote.prune(1)
        assert download_model(bucket, url, Path(f"after-{number}")) == "local-2"
        assert [one.problem for one in remote.checkpoints()] == [""]
        number += 1
    assert number > 4


def test_a_damaged_checkpoint_is_passed_over(bucket: Any, saved: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    remote = RemoteFolder(URL)
    remote.upload(saved[0])
    name = remote.upload(saved[1])
    content = bytearray(bucket.cat_file(f"bucket/run/{name}/state.json"))
    content[-2] ^= 1
    bucket.pipe_file(f"bucket/run/{name}/state.json", bytes(content))
    train(epochs=2, folder="out/other", checkpoint=None, resume=URL)
    assert "state.json has changed since it was written" in caplog.text
    assert "continuing from out/checkpoint-other.resumed/step-00000001" in caplog.text


class TestLease(LeaseTests):
    """On moto."""


def test_two_machines_with_one_host_name_are_not_taken_for_one(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    machines = iter(["node, boot 1", "node, boot 2"])
    monkeypatch.setattr(remote_checkpoints, "_describe_machine", lambda: next(machines))
    first, second = Lease(RemoteFolder(URL), "first"), Lease(RemoteFolder(URL), "second")
    first._content["process"] = 2**30  # of the other machine; here, no process has that number
    first.take()
    with pytest.raises(CheckpointError, match=r"in use by run first \(process 1073741824 on node\)"):
        second.take()
    first.release()


def test_a_start_that_fails_leaves_no_lease(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(remote_checkpoints, "write_text", fail)
    with pytest.raises(OSError, match="disk full"):
        train(epochs=1)
    assert not bucket.exists("bucket/run/lease.json")


def test_checkpoints_of_another_run_are_not_touched(bucket: Any) -> None:
    train(epochs=1)
    before = bucket.find("bucket", detail=True)
    with pytest.raises(CheckpointError, match='resume="auto" continues that run'):
        train(epochs=1, folder="out/other", resume=False)
    assert bucket.find("bucket", detail=True).keys() == before.keys()


@pytest.mark.parametrize(
    ("url", "expected"),
    [("s3://missing/run", "bucket does not exist"), ("nothing://x/y", "Protocol not known: nothing")],
)
def test_a_url_that_cannot_be_used_is_an_error_before_training(bucket: Any, url: str, expected: str) -> None:
    module = Linear()
    with pytest.raises(CheckpointError, match=expected):
        train(module, checkpoint=url, resume=False)


class Untrained(Linear):
    """Fails in its first step: the store is checked before."""

    def step(self, batch: Any) -> torch.Tensor:
        raise AssertionError


@pytest.fixture
def new_clients() -> Iterator[None]:
    """Let clients of the store read the environment again, before the test and after it."""
    fsspec.filesystem("s3").clear_instance_cache()
    yield
    fsspec.filesystem("s3").clear_instance_cache()


@pytest.mark.parametrize("argument", ["checkpoint", "model_path"])
@pytest.mark.parametrize("resume", [False, "auto"])
def test_a_store_that_is_read_only_is_an_error_before_training(
    bucket: Any, proxy: Proxy, argument: str, resume: Any
) -> None:
    proxy.reset("read-only", 0, NEVER)
    urls = {"checkpoint": URL} if argument == "checkpoint" else {"folder": URL, "checkpoint": None}
    with pytest.raises(CheckpointError, match=rf"PermissionError[\s\S]*a local folder as `{argument}`"):
        train(Untrained(), resume=resume, num_sanity_val_steps=0, failures={"preflight": False}, **urls)
    assert list(Path().rglob("*.safetensors")) == []


def test_missing_credentials_are_an_error_before_training(
    bucket: Any, new_clients: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "none")
        patch.setenv("AWS_CONFIG_FILE", "none")
        with pytest.raises(CheckpointError, match=r"Unable to locate credentials[\s\S]*check the URL, the credentials"):
            train(Untrained(), failures={"preflight": False})


def test_a_lease_whose_answer_was_lost_is_ours(bucket: Any, proxy: Proxy) -> None:
    lease = Lease(RemoteFolder(URL), "first")
    proxy.reset("lost", 1, 1)  # the first request finds no lease
    lease.take()
    proxy.reset()
    assert json.loads(bucket.cat_file("bucket/run/lease.json"))["run"] == "first"
    lease.release()
    assert not bucket.exists("bucket/run/lease.json")


def test_accmt_check_lists_what_is_there_and_cleans_up(
    bucket: Any, saved: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    remote = RemoteFolder(URL)
    whole = remote.upload(saved[0])
    bucket.pipe_file("bucket/run/step-00000007-0123abcd/state.json", b"half")
    bucket.pipe_file("bucket/run/notes.txt", b"somebody's")
    assert main(["check", URL]) == 1
    printed = capsys.readouterr().out
    assert f"{whole}: complete" in printed
    assert "step-00000007-0123abcd: its upload was not finished" in printed
    assert main(["check", URL, "--clean"]) == 0
    assert "deleted step-00000007-0123abcd" in capsys.readouterr().out
    assert [one.name for one in remote.checkpoints()] == [whole]
    assert bucket.exists("bucket/run/notes.txt")
    assert main(["check", "s3://bucket/empty"]) == 2


def test_a_store_that_goes_away_does_not_stop_training_and_accmt_sync_uploads_the_rest(
    bucket: Any, proxy: Proxy, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    class CutOff(Callback):
        def on_fit_start(self) -> None:
            proxy.reset("error", 0, NEVER)

    train(callbacks=CutOff(), checkpoint_every="1 epoch")
    assert "could not be uploaded to s3://bucket/run" in caplog.text
    assert inspect(Path("out/checkpoint-model"))[-1].manifest.step == 4
    proxy.reset()
    assert steps_in(RemoteFolder(URL)) == []
    assert main(["sync", "out/checkpoint-model"]) == 0
    assert steps_in(RemoteFolder(URL)) == [4]
    capsys.readouterr()
    assert main(["sync", "out/checkpoint-model"]) == 0
    assert capsys.readouterr().out == "nothing was left to upload\n"


def test_accmt_sync_completes_a_checkpoint_from_the_disks_of_two_machines(
    bucket: Any, saved: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for disk, missing in (("a", "*.safetensors"), ("b", "state.json")):
        shutil.copytree(saved[0], f"{disk}/{saved[0].name}", ignore=shutil.ignore_patterns(missing))
        origin = {"url": URL, "run": "run", "keep": 1, "is_part": True}
        (Path(disk) / remote_checkpoints.ORIGIN).write_text(json.dumps(origin))
    assert main(["sync", "a"]) == 2
    assert "run `accmt sync` on the other machines, too" in capsys.readouterr().err
    assert steps_in(RemoteFolder(URL)) == []
    assert main(["sync", "b"]) == 0
    newest = RemoteFolder(URL).newest_first()[0]
    assert inspect(download(partial(RemoteFolder, URL), newest, Path("whole")))[0].is_complete


def test_secrets_in_a_url_are_written_nowhere(bucket: Any, proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    url = "s3://user:planted-password@bucket/run"
    with pytest.raises(CheckpointError) as error:
        train(checkpoint=url, resume="auto")
    written = "".join(path.read_text(errors="replace") for path in Path().rglob("*") if path.is_file())
    assert "planted-password" not in str(error.value) + caplog.text + written


class Hosts:
    """Hosts with separate disks, which train together.

    Args:
        folder: Where their disks are.
        url: Their checkpoints.
        processes: How many hosts, and the engine.
    """

    def __init__(self, folder: Path, url: str, processes: int | str) -> None:
        self.folder, self.url, self.processes = folder, url, processes

    def run(self, epochs: int, processes: int | str | None = None, *, url: str | None = None) -> dict[str, Any]:
        """Train to the end, from empty disks, and return weights and optimizer state."""
        self.empty_disks()
        result, url = self.folder / "weights.pt", self.url if url is None else url
        result.unlink(missing_ok=True)
        launch(ON_HOSTS, str(self.folder), url, str(epochs), "0", processes=processes or self.processes, result=result)
        state: dict[str, Any] = torch.load(result)
        return state

    def run_until_killed(self, kill_at: int = 0, kill_in: str = "") -> list[int | None]:
        """Train three epochs; return how each host ended."""
        arguments = [str(self.folder), self.url, "3", str(kill_at), *([kill_in] if kill_in else [])]
        forks, _ = run_together(ON_HOSTS, *arguments, processes=self.processes)
        return [fork.poll() for fork in forks]

    def empty_disks(self) -> None:
        for name in ("disk", "disk-0", "disk-1", "disk-2"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir()

    def files(self, host: int, step: int) -> list[str]:
        """Return the files of a checkpoint on the disk of a host."""
        return sorted(path.name for path in self.folder.glob(f"disk-{host}/out/*/step-{step:08d}/*"))

    @property
    def resumed_at(self) -> str:
        return (self.folder / "said").read_text().removeprefix("resumed at ")


@pytest.fixture(scope="module")
def ends() -> dict[int | str, dict[str, Any]]:
    """The ends of runs that were not killed, by the processes that made them."""
    return {}


@pytest.fixture
def hosts(
    bucket: Any, tmp_path: Path, ends: dict[int | str, dict[str, Any]], request: pytest.FixtureRequest
) -> tuple[Hosts, dict[str, Any]]:
    """Hosts that were killed in step 3, and the end of a run that was not."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("separate disks are namespaces of mounts, which cannot be made here")
    hosts = Hosts(tmp_path, f"s3://bucket/hosts-{request.param}", request.param)
    if request.param not in ends:
        ends[request.param] = hosts.run(3, url="")
    hosts.empty_disks()
    assert hosts.run_until_killed(kill_at=3) == [-signal.SIGKILL] * 2
    assert hosts.files(0, 2) == ["manifest.json", "state.json", "tensors-00001-of-00002.safetensors"]
    assert hosts.files(1, 2) == ["manifest.json", "tensors-00002-of-00002.safetensors"]
    return hosts, ends[request.param]


def are_equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first.keys() | second.keys())


@pytest.mark.parametrize("hosts", [2, "fsdp-2"], indirect=True)
def test_hosts_without_a_common_disk_continue_on_empty_disks(
    bucket: Any, proxy: Proxy, hosts: tuple[Hosts, dict[str, Any]]
) -> None:
    run, whole = hosts
    proxy.reset()
    assert are_equal(whole, run.run(3))
    assert run.resumed_at == "2"
    tensors = [name for name in proxy.downloads if name[1].endswith(".safetensors")]
    files = ["step-00000002/tensors-00001-of-00002.safetensors", "step-00000002/tensors-00002-of-00002.safetensors"]
    assert sorted(tensors) == [("host-0", files[0]), ("host-1", files[1])]
    assert ("host-1", "step-00000002/state.json") in proxy.downloads
    assert steps_in(RemoteFolder(run.url))[-1] == 6
    assert not bucket.exists(f"{run.url.removeprefix('s3://')}/lease.json")
    assert len(RemoteModelFolder(f"{run.url}-models").newest_first()) >= 1
    ends = [whole]
    others: list[tuple[int, int | str, int]] = [(4, 1, 2)]  # epochs, processes, files
    if run.processes == "fsdp-2":
        others = [(4, "fsdp-3", 2), (5, 1, 3)]
    for epochs, processes, num_files in others:
        proxy.reset()
        ends.append(run.run(epochs, processes))
        assert are_equal(ends[-2], torch.load(run.folder / "resumed.pt"))
        shards = [name for name in proxy.downloads if name[1].endswith(".safetensors")]
        assert len({file for _, file in shards}) == len(shards) == num_files


@pytest.mark.parametrize("hosts", ["fsdp-2"], indirect=True)
def test_hosts_that_are_killed_in_a_download_continue(proxy: Proxy, hosts: tuple[Hosts, dict[str, Any]]) -> None:
    run, whole = hosts
    run.empty_disks()
    assert run.run_until_killed(kill_in="download")[1] == -signal.SIGKILL
    assert [run.files(0, 2), run.files(1, 2)] == [[], []]
    assert run.run_until_killed(kill_in="publish")[1] == -signal.SIGKILL
    assert run.files(1, 2) == []
    assert run.run_until_killed(kill_at=3) == [-signal.SIGKILL] * 2
    assert run.files(0, 2) == ["manifest.json", "state.json", "tensors-00001-of-00002.safetensors"]
    assert run.files(1, 2) == ["manifest.json", "state.json", "tensors-00002-of-00002.safetensors"]
    proxy.reset()
    assert run.run_until_killed(kill_at=NEVER) == [0, 0]
    assert run.resumed_at == "2"
    assert not [name for name in proxy.downloads if name[1].endswith(".safetensors")]
    assert are_equal(whole, torch.load(run.folder / "weights.pt"))
    assert not list(run.folder.glob("disk-*/out/*/.tmp-*"))


@pytest.mark.parametrize("hosts", ["fsdp-2"], indirect=True)
def test_hosts_skip_a_checkpoint_of_which_one_shard_is_damaged(
    bucket: Any, hosts: tuple[Hosts, dict[str, Any]]
) -> None:
    run, whole = hosts
    [shard] = bucket.glob(f"{run.url.removeprefix('s3://')}/step-00000002-*/tensors-00002-of-00002.safetensors")
    content = bytearray(bucket.cat_file(shard))
    content[-1] ^= 1
    bucket.pipe_file(shard, bytes(content))
    assert are_equal(whole, run.run(3))
    assert run.resumed_at == "1"
