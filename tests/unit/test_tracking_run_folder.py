from pathlib import Path

import pytest

from accmt.tracking.history import RunPlace, default_track_name, folder_name, is_url


@pytest.mark.parametrize("model_path", ["a/b", "a/b/", "a/b//", "a/./b/.", "a/c/../b/", Path("a/b")])
def test_track_name_is_the_base_name_however_the_path_ends(model_path):
    assert default_track_name(model_path) == "b"


@pytest.mark.parametrize(
    "place",
    [
        "http://tracking.example:5000",
        "https://host/path",
        "ftp://host/x",
        "sqlite:///mlflow.db",
        "databricks",
        "databricks://profile",
        "localhost",
        "localhost:5000",
        "127.0.0.1:8080",
        "mlflow.internal:80/prefix",
    ],
)
def test_servers_and_databases_are_urls(place):
    assert is_url(place)


@pytest.mark.parametrize(
    "place",
    ["logs", "./logs", "/var/log/runs", "a/localhost", "file:///tmp/logs", "run:final", "x:123456", Path("logs")],
)
def test_folders_are_no_urls(place):
    assert not is_url(place)


@pytest.mark.parametrize(
    ("place", "url"),
    [
        ("localhost", "http://localhost"),
        ("10.0.0.7:5000", "http://10.0.0.7:5000"),
        ("https://host", "https://host"),
        ("databricks", "databricks"),
        ("logs", None),
    ],
)
def test_a_host_without_scheme_becomes_http(place, url):
    assert RunPlace(place, "track", "run").url == url


def test_run_folder_lies_below_logging_dir_and_track():
    assert RunPlace("here/logs", "track", "run").run_folder == Path("here/logs/track/run")


def test_run_folder_of_a_url_lies_in_logs():
    assert RunPlace("http://host", "track", "run").run_folder == Path("logs/track/run")


def test_a_file_uri_is_the_folder_it_names():
    assert RunPlace("file:///tmp/my%20logs", "track", "run").base_folder == Path("/tmp/my logs")


@pytest.mark.parametrize("name", ["../../etc", "/etc/passwd", "..", ".", "", "a\0b", "team/news"])
def test_no_name_leads_out_of_the_logging_dir(name):
    folder = RunPlace("logs", name, name).run_folder
    assert len(folder.parts) == 3
    assert ".." not in folder.parts
    assert "\0" not in str(folder)


def test_a_long_name_is_shortened_and_stays_its_own():
    names = ["x" * 300, "x" * 301, "é" * 200]
    folders = [folder_name(name) for name in names]
    assert len(set(folders)) == 3
    assert all(len(folder.encode()) <= 180 for folder in folders)
    assert folder_name("é" * 90) == "é" * 90
    (Path() / folders[2]).mkdir()
