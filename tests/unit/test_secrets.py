"""What is hidden, and that nothing which leaves memory holds a secret, whatever entrance it came by."""

import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from accelerate.tracking import GeneralTracker

from accmt import ArgumentError, Callback, HyperParameters, LambdaCallback, secrets
from accmt.addons.sync import sync_run
from accmt.addons.trackers.delivery_state import DeliveryFile
from accmt.errors import explain
from accmt.messages import say, warn
from accmt.secrets import hide, hide_text, is_secret_name, remember, write_command
from tests.toys import HPS, Linear, Record, make_points, make_trainer

SECRET_NAMES = """token hf_token hub_token HF_TOKEN write_token session_token use_auth_token api_key apiKey X-Api-Key
key secret client_secret AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID password db_password PGPASSWORD passwd pwd MYSQL_PWD pw
passphrase auth Authorization credential credentials header headers cookie Set-Cookie db_pass private_key bearer jwt"""
OTHER_NAMES = """tokenizer max_tokens num_tokens tokens pad_token eos_token_id token_type_ids key_padding
key_padding_mask monkey keyboard label_key text_key keys sort_key experiment_key lr header_rows author auth_type
forward_pass passes secretary token_file password_file HF_TOKEN_PATH compass pwdx cookies_per_batch"""


def test_words_of_a_name_decide():
    assert [name for name in SECRET_NAMES.split() if not is_secret_name(name)] == []
    assert [name for name in OTHER_NAMES.split() if is_secret_name(name)] == []


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("https://me:hunter2@host:80/x", "https://***@host:80/x"),
        ("postgresql+psycopg://me:pa/ss@db/x", "postgresql+psycopg://***@db/x"),
        ("https://abcdef@host", "https://***@host"),
        ("at https://h/a?x=1&token=abc&y=2", "at https://h/a?x=1&token=***&y=2"),
        ("https://h/a?X-Amz-Signature=abc#access_token=abc", "https://h/a?X-Amz-Signature=***#access_token=***"),
        (f"hf_{'aB3' * 11}", "***"),
        (f"got: 'ghp_{'a1' * 18}'", "got: '***'"),
        (f"github_pat_{'a1_' * 10}", "***"),
        (f"sk-ant-{'a1-' * 10}x", "***"),
        ("AKIAABCDEFGHIJKLMNOP", "***"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dozjgNryP4J3jVmN", "***"),
        (
            "-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----",
            "-----BEGIN PRIVATE KEY-----***-----END PRIVATE KEY-----",
        ),
    ],
)
def test_secrets_are_known_by_their_shape(text, hidden):
    assert hide_text(text) == hidden
    assert hide_text(hidden) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "http://localhost:5000/a@b, http://host:80, mail me@example.org",
        "ssh://git@github.com/x and s3://bucket/key",
        "a misspelt key: 'lr_scheduler2', pad_token='<|end1of|>', token: 3, max_tokens=4096",
        "task-1234567890123456789 sk-learn-classification-model hf_transformers_cache",
        "set WANDB_API_KEY, or run `wandb login`",
    ],
)
def test_ordinary_text_stays(text):
    assert hide_text(text) == text


def test_values_of_the_environment_are_hidden_where_they_are_no_words_or_places(monkeypatch, tmp_path):
    variables = {"SERVICE_TOKEN": "correct-horse", "OTHER_TOKEN": "correct-horse-battery", "SHORT_TOKEN": "abc"}
    variables |= {"SSH_AUTH": str(tmp_path), "TOKENIZERS_PARALLELISM": "disabled-for-now"}
    monkeypatch.setattr(secrets, "os", SimpleNamespace(environ=variables, path=os.path))
    text = f"abc in {tmp_path} and {Path.cwd()}: disabled-for-now"
    assert hide_text(f"correct-horse-battery, correct-horse: {text}") == f"***, ***: {text}"


def test_containers_are_hidden_at_any_depth():
    value = {"a": [{"token": "x", "token_type": "y"}], "m.password": 1234, "token": True, "header": 0, "n": (1, "k")}
    shown = {"a": [{"token": "***", "token_type": "y"}], "m.password": "***", "token": True, "header": 0, "n": (1, "k")}
    assert hide(value) == shown
    assert hide({"a": {"token": "x", "b": 1}, "c": ["https://a:b@c", 2]}, leave_out=True) == {"a": {"b": 1}, "c": [2]}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("train.py", "train.py"),
        ("train.py fit --lr 0.1 --verbose --n -3", "train.py fit --lr 0.1 --verbose --n -3"),
        ("t.py -p hunter2 -pHunter2 -n -3 --out x -v", "t.py -p ... -p... -n ... --out x -v"),
        ("t.py -v --epochs 3", "t.py -v --epochs 3"),
        ("t.py -p=hunter2 -password hunter2 --verbose x", "t.py -p... -p... ... --verbose x"),
        ("train.py --api-key=abc --hub_token abc def --name x", "train.py --api-key=... --hub_token ... ... --name x"),
        (
            "train.py WANDB_API_KEY=abc db.password=x optim.lr=3",
            "train.py WANDB_API_KEY=... db.password=... optim.lr=3",
        ),
        ("t.py --pwd a --auth b --header 'Authorization: Basic c'", "t.py --pwd ... --auth ... --header ..."),
        ("t.py --uri https://me:x@host/ --config '{a: b}'", "t.py --uri https://...@host/ --config '{a: b}'"),
    ],
)
def test_a_command_shows_all_but_its_secrets(arguments, shown):
    assert write_command(["python", *shlex.split(arguments)]) == f"python {shown}"


def test_messages_and_errors_hide_what_settings_hold(caplog):
    caplog.set_level("INFO", logger="accmt")
    remember({"headers": {"x": "from-a-header"}, "uri": "https://me:from%20a-url@host", "words": "an ordinary one"})
    say("from-a-header, an ordinary one")
    warn("from a-url")
    assert caplog.messages == ["***, an ordinary one", "***"]
    assert "from-a-header" not in explain("here", "from-a-header", "nothing", "nothing")


class Rows(GeneralTracker):
    """Keeps all that it is handed, as a service would."""

    name = "rows"
    requires_logging_directory = False
    tracker = None
    seen: ClassVar[list[Any]] = []

    def __init__(self, run_name: str, api_key: str, headers: dict[str, str], store: str) -> None:
        super().__init__()
        self.got = api_key, headers, store

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.seen.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.seen.append(values)
        if len(self.seen) == 3:
            raise ConnectionError(f"no answer to {self.got}")


NUMBERED = iter(range(100))


def plant(shape: str = "planted-{}-secret") -> str:
    """Return a new secret; each holds a part that no other text of a run has."""
    return shape.format(f"q{next(NUMBERED):02}Zx9")


def in_url() -> str:
    return f"https://me:{plant()}@host.invalid/x"


class Nets(Linear):
    """Logs in again at each step, as a program does whose sessions end."""

    def __init__(self) -> None:
        super().__init__()
        self.logins: dict[str, Any] = {"password": None, "number": 0, "key": torch.zeros(1)}
        self.api_key = ""

    def training_step(self, batch: Any) -> Any:
        self.api_key = plant()
        self.logins |= {"password": plant(), "headers": {"X": plant()}, "number": self.logins["number"] + 1}
        self.logins["key"] += 1
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:
        return {"loss": self.step(batch)}


def test_forty_secrets_in_every_entrance_are_in_no_file_row_line_or_error(monkeypatch, caplog, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("DEBUG")
    tokens = ["hf_{}aaaaaaaaaaaaaaaaaaaaaaaa", "ghp_{}aaaaaaaaaaaaaaaaaaaaaaaa", "sk-{}-aaaaaaaaaaaaaaaaaaaa"]
    tokens += ["github_pat_{}aaaaaaaaaaaaaaaaaaaaaaaa", "xoxb-{}aaaaaaaaaa"]
    keys = ("token", "api_key", "password", "secret", "passphrase", "client_secret", "credential", "cookie")
    keys += ("apiKey", "access_key", "pwd", "auth", "private_key", "session_token", "jwt", "X-Api-Key")
    variables = {name: plant() for name in ("SERVICE_TOKEN", "DB_PASSWORD", "MY_API_KEY")}
    monkeypatch.setattr(secrets, "os", SimpleNamespace(environ=variables, path=os.path))
    flags = [
        "--pwd",
        plant(),
        f"--api-key={plant()}",
        "--uri",
        in_url(),
        "--header",
        f"X-Key: {plant()}",
        "--hub_token",
        plant(),
        f"-p{plant()}",
        "-p",
        plant(),
    ]
    monkeypatch.setattr(sys, "argv", ["train.py", *flags, f"API_KEY={plant()}", f"db.password={plant()}"])
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-u", "-m", "train", *sys.argv[1:]])
    model = {"path": "base", "revision": in_url(), **{key: plant() for key in keys}}
    model["headers"] = {"Authorization": f"Bearer {plant()}"}
    hps = {"model": model, "optim": {"type": "SGD", "lr": 0.1}}
    extra = {f"note_{i}": plant(shape) for i, shape in enumerate(tokens)}
    extra |= {
        "deep": [{"auth": plant(), "url": f"https://host/?sig={plant()}"}],
        "env": [f"as {value}" for value in variables.values()],
    }
    settings = {
        "log_with": Rows,
        "rows": {"api_key": plant(), "headers": {"X": plant()}, "store": in_url()},
        "tracker_options": {"config": extra},
        "model_saving": "best_valid_loss",
        "checkpoint_every": "epoch",
        "run_name": "one",
    }
    error_text = f"cannot log in at {in_url()}"

    def fail() -> None:
        raise ConnectionError(error_text)

    trainer = make_trainer(hps, **settings, callbacks=LambdaCallback(on_fit_end=fail))
    with pytest.raises(ConnectionError):
        trainer.fit(Nets(), make_points(), make_points())
    again = make_trainer({**hps, "epochs": 2}, **settings, resume=True)
    assert again.hps.model["token"] == model["token"]  # training has the value itself
    again.fit(Nets(), make_points(), make_points())
    assert "changed since that checkpoint: model" not in caplog.text
    with pytest.raises(ArgumentError) as raised:
        make_trainer(hps, logging_dir=in_url()).fit(Nets(), make_points(), make_points())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    written = {str(path): path.read_bytes().decode("latin-1") for path in files}
    written |= {"log": caplog.text, "output": "".join(capfd.readouterr()), "rows": repr(Rows.seen)}
    written |= {"error": str(raised.value), "repr": repr(again.hps)}
    # What the user's own program raised stands in its traceback; pytest logs nothing of it.
    parts = [f"q{number:02}Zx9" for number in range(next(NUMBERED))]
    assert len(parts) >= 40
    assert {name: found for name, text in written.items() if (found := [one for one in parts if one in text])} == {}
    assert "note_0" in repr(Rows.seen)
    assert "README.md" in " ".join(written)
    (launches,) = tmp_path.rglob("launches.jsonl")
    assert '"-u", "-m", "train", "--pwd"' in launches.read_text()


class Login(Callback):
    """Has a session whose token changes, and numbers that belong to a checkpoint."""

    def __init__(self, password: str) -> None:
        self.login: dict[str, Any] = {"password": password, "number": 0}
        self.seen: Any = Record()

    def on_update_end(self) -> None:
        self.seen.append((self.login["password"], self.login["number"]))
        self.login |= {"number": self.login["number"] + 1, "session_token": f"session {self.login['number']}"}


def test_a_resume_restores_what_is_beside_a_secret_and_keeps_the_programs(caplog):
    caplog.set_level("WARNING", logger="accmt")
    settings = {"checkpoint_every": "epoch", "verbose": None}
    make_trainer({"epochs": 1}, **settings, callbacks=Login("first")).fit(Linear(), make_points())
    assert [text for text in caplog.messages if "secret's name" in text] == [
        f"Login.login.{name} has a secret's name, so checkpoints do not contain it: "
        "set it in on_fit_start, or rename it if it is none"
        for name in ("password", "session_token")
    ]
    login = Login("second")
    trainer = make_trainer({"epochs": 2}, **settings, resume=True, callbacks=login)
    trainer.fit(Linear(), make_points())
    assert login.seen[0] == ("second", trainer.state.global_step // 2)


def test_hyper_parameters_without_their_secrets_are_read_again(tmp_path):
    from accmt.saving.model_folder import write_hps

    hps = HyperParameters.from_config({**HPS, "model": {"path": "base", "token": "abc", "password": 1234}})
    write_hps(tmp_path, hps.to_dict())
    assert HyperParameters.from_config(tmp_path / "hps.yaml").model == {"path": "base"}
    assert hps.get_config()["model.token"] == "***"
    assert "abc" not in repr(hps)


def test_rows_are_synced_to_a_server_whose_password_is_in_no_file(monkeypatch, tmp_path):
    from accmt.addons.trackers.delivery_state import Account
    from accmt.tracking.history import History

    whole = "https://me:hunter22@host.invalid/x"
    history = History(tmp_path)
    history.add_values({"loss": 1.0}, 1)
    history.close()
    delivery_file = DeliveryFile(tmp_path, "track", "run")
    delivery_file.accounts["mlflow"] = Account(server=hide_text(whole))
    delivery_file.save()
    (synced,) = sync_run(tmp_path)
    assert synced.num_left == 1
    assert "with --server" in (synced.problem or "")
    found = []

    def record(spec, start, *args, **kwargs):
        found.append(start.place.logging_dir)
        raise InterruptedError

    monkeypatch.setattr(sys.modules["accmt.addons.sync"], "Delivery", record)
    with pytest.raises(InterruptedError):
        sync_run(tmp_path, server=whole)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", whole)
    with pytest.raises(InterruptedError):
        sync_run(tmp_path)
    assert found == [whole, whole]
