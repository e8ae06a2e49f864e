from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from accmt.errors import MissingPackageError
from accmt.huggingface import require_library
from accmt.libraries import private_names, versions
from accmt.libraries.versions import BRANCHES, FLOORS, release_of, require
from tests.raising import raises_at
from tests.toys import Linear, make_points, make_trainer

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _nothing_checked_yet():
    require.cache_clear()
    yield
    require.cache_clear()


@pytest.fixture
def bounds():
    """Return the lower bounds of pyproject.toml, by the names under which packages are imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    pairs = (line.split(",")[0].partition(">=") for lines in groups for line in lines)
    python = project["requires-python"].removeprefix(">=")
    return {name.replace("-", "_"): bound for name, _, bound in pairs if bound} | {"python": python}


def install(monkeypatch, name, version):
    module = ModuleType(name)
    if version is not None:
        module.__version__ = version
    monkeypatch.setitem(sys.modules, name, module)


def test_the_floors_are_the_bounds_of_pyproject(bounds):
    assert {name: bounds[name] for name in FLOORS} == dict(FLOORS)
    assert bounds["datasets"] == BRANCHES["why_states_are_inexact"][1]


def test_a_branch_goes_when_its_floor_is_reached(bounds):
    for function, (package, version) in BRANCHES.items():
        assert hasattr(versions, function) or hasattr(private_names, function)
        reached = release_of(bounds[package]) >= release_of(version)
        assert package == "datasets" or not reached, f"{function}: {package}>={version} now; remove it"


@pytest.mark.parametrize("name", FLOORS)
def test_what_is_installed_here_is_new_enough(name):
    pytest.importorskip(name)
    require(name)


@pytest.mark.parametrize("version", ["0.19", "0.19.0+local", "0.19.0a0+vendor", "0.20.1", "10.0"])
def test_a_version_at_or_above_the_floor_is_taken(monkeypatch, version):
    install(monkeypatch, "peft", version)
    require("peft")


def test_a_package_that_nobody_knows_the_version_of_is_taken(monkeypatch):
    install(monkeypatch, "torchmetrics", None)
    monkeypatch.setattr("importlib.metadata.version", lambda name: require_metadata(name))
    require("torchmetrics")


def require_metadata(name):
    raise import_module("importlib.metadata").PackageNotFoundError(name)


def test_a_missing_package_is_an_error_with_the_line_for_pip(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(MissingPackageError) as caught:
        require("pydantic")
    assert str(caught.value).startswith("pydantic\n  got: pydantic is not installed")
    assert str(caught.value).endswith('do: pip install "pydantic>=2.12"')


def test_a_package_that_is_installed_in_part_says_what_it_lacks(monkeypatch, tmp_path):
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "__init__.py").write_text("import peft.missing_part\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    with raises_at(MissingPackageError, "peft", "peft.missing_part", do="--force-reinstall"):
        require("peft")


def test_an_older_version_that_cannot_be_imported_is_named(monkeypatch, tmp_path):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise ImportError('hub<1 is required\\nTry: pip')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingPackageError, match=r"cannot be imported: hub<1 is required\n  expected"):
        require("transformers")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.1")
    with raises_at(MissingPackageError, "transformers", "transformers 4.57.1", do="pip install "):
        require("transformers")


@pytest.mark.parametrize("name", ["transformers", "peft"])
def test_a_model_of_an_older_library_is_an_error(monkeypatch, name):
    part = {"transformers": "transformers.modeling_utils", "peft": "peft.peft_model"}[name]
    kind = {"transformers": "PreTrainedModel", "peft": "PeftModel"}[name]
    for each in ("transformers.modeling_utils", "peft.peft_model"):
        monkeypatch.setitem(sys.modules, each, None)
    install(monkeypatch, name, "0.1")
    install(monkeypatch, part, None)
    monkeypatch.setattr(sys.modules[part], kind, type(kind, (), {}), raising=False)
    require_library(object())
    with raises_at(MissingPackageError, "self.model", f"{name} 0.1"):
        require_library(getattr(sys.modules[part], kind)())


def test_a_run_rejects_a_model_of_an_older_library(monkeypatch):
    module = Linear()
    install(monkeypatch, "transformers.modeling_utils", None)
    monkeypatch.setattr(
        sys.modules["transformers.modeling_utils"], "PreTrainedModel", type(module.model), raising=False
    )
    install(monkeypatch, "transformers", "5.3.1")
    with raises_at(MissingPackageError, "self.model", "transformers 5.3.1"):
        make_trainer().fit(module, make_points(8))


@pytest.mark.parametrize(
    ("package", "version", "line"),
    [
        ("torch", "2.6.0", "from accmt import Trainer"),
        ("pydantic", "2.8.2", "from accmt import HyperParameters; HyperParameters()"),
    ],
)
def test_the_part_that_needs_an_older_package_says_so_when_it_is_imported(tmp_path, package, version, line):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"__version__ = {version!r}\n", encoding="utf-8")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; {line}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1
    assert f"got: {package} {version}" in run.stderr
    assert f'do: pip install "{package}>={FLOORS[package]}"' in run.stderr


def test_a_kind_of_parallelism_that_accelerate_does_not_have_yet_is_of_size_1():
    config = SimpleNamespace(tp_size=2)
    assert [versions.parallel_size(config, name) for name in ("tp", "sp")] == [2, 1]


def test_an_accelerator_after_one_with_a_mesh_is_built_with_that_mesh(monkeypatch):
    first = versions.make_accelerator({"cpu": True})
    assert first.state.parallelism_config is None
    mesh = {"get_device_mesh": lambda device: f"mesh on {device}", "_validate_accelerator": lambda other: None}
    config = SimpleNamespace(**mesh)
    monkeypatch.setattr(first.state, "parallelism_config", config)
    monkeypatch.setattr(first.state, "device_mesh", None)
    assert versions.make_accelerator({"cpu": True}).state.device_mesh == "mesh on cpu"
    assert versions.make_accelerator({"parallelism_config": None}).state.parallelism_config is config


class Model:
    """A transformers model of before 5.23."""

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        self.got = gradient_checkpointing_kwargs


def test_activations_are_recomputed_by_the_method_that_older_models_have():
    model = Model()
    versions.checkpoint_activations(model, {"use_reentrant": False})
    assert model.got == {"use_reentrant": False}
