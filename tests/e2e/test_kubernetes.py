"""The manifests of the Kubernetes recipe: their parts fit together, and `accmt launch` takes their command lines."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from accmt.cli.main import main
from tests.e2e.markdown import ROOT
from tests.launching import run_script

FOLDER = ROOT / "examples" / "kubernetes"
TRAIN_JOB = FOLDER / "kubeflow.yaml"
MANIFESTS = sorted(set(FOLDER.glob("*.yaml")) - {TRAIN_JOB})
IMAGE = "/app/"


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the objects of a manifest by their kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))}


def pod_of(path: Path) -> dict[str, Any]:
    return read_manifest(path)["Job"]["spec"]["template"]["spec"]


def command_of(path: Path, index: int = 0) -> list[str]:
    """Return the arguments of `accmt` in the pod with that index, with the examples of this repository."""
    program, *words = pod_of(path)["containers"][0]["command"]
    assert program == "accmt"
    return [word.replace("$(JOB_COMPLETION_INDEX)", str(index)).replace(IMAGE, f"{ROOT}/") for word in words]


def dry_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert words[0] == "launch"
    assert main(["launch", "--dry-run", *words[1:]]) == 0
    return shlex.split(capsys.readouterr().out)


def test_one_machine_runs_the_script_itself_which_hears_the_signal(capsys: pytest.CaptureFixture[str]):
    _, _, *command = dry_run(command_of(FOLDER / "one-machine.yaml"), capsys)
    assert command == [str(ROOT / "examples/slurm/train.py"), "--output", "/runs/out/digits"]


def test_two_machines_have_numbers_and_meet_at_the_first(capsys: pytest.CaptureFixture[str]):
    path = FOLDER / "two-machines.yaml"
    manifest, pod = read_manifest(path), pod_of(path)
    job, service = manifest["Job"], manifest["Service"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"  # what Kubernetes calls the first pod
    for index in (0, 1):
        command = dry_run(command_of(path, index), capsys)
        assert {"--nnodes=2", f"--node-rank={index}", f"--master-addr={host}", "--nproc-per-node=1"} <= set(command)
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_what_is_mounted_is_a_volume_and_holds_all_that_is_written(path: Path):
    pod, command = pod_of(path), command_of(path)
    (container,) = pod["containers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    places = {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in volumes}
    assert places == {"/runs"}
    assert container["workingDir"] == "/runs"
    assert command[command.index("--output") + 1].startswith("/runs/")
    assert pod["restartPolicy"] == "Never"
    for rule in read_manifest(path)["Job"]["spec"].get("podFailurePolicy", {"rules": []})["rules"]:
        assert rule.get("onExitCodes", {}).get("containerName", container["name"]) == container["name"]


@pytest.mark.slow
def test_the_script_of_the_manifests_runs_with_their_arguments(tmp_path: Path):
    *_, script, flag, folder = command_of(FOLDER / "one-machine.yaml")
    run = run_script(Path(script), flag, folder.removeprefix("/runs/"), "--epochs", "1")
    assert run.returncode == 0, run.stderr
    assert "finished  57 updates" in run.stdout


def test_the_train_job_is_one_of_kubeflow_and_all_that_it_writes_is_in_the_bucket():
    manifest = yaml.safe_load(TRAIN_JOB.read_text(encoding="utf-8"))
    job = TrainerV1alpha1TrainJob.from_dict(manifest)  # unknown types and missing fields are errors, unknown fields not
    trainer = job.spec.trainer
    kept = job.to_dict()["spec"]["trainer"]
    assert kept == manifest["spec"]["trainer"], "a field that Kubeflow does not have"
    program, script = trainer.command
    assert program == "torchrun"  # which reads the PET_... variables of the runtime
    assert Path(script.replace(IMAGE, f"{ROOT}/")).is_file()
    folders = dict(zip(trainer.args[::2], trainer.args[1::2], strict=True))
    assert folders.keys() == {"--output", "--checkpoint"}
    assert all(folder.startswith("s3://") for folder in folders.values())
