"""What `import accmt` offers, and that it does nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import accmt


@pytest.mark.parametrize("name", accmt.__all__)
def test_every_public_name_resolves_to_the_object_of_that_name(name):
    value = getattr(accmt, name)
    if name == "__version__":
        assert isinstance(value, str)
    elif name in ("Optimizer", "Scheduler"):  # short names as attributes
        assert dir(value)
    else:
        assert value.__name__ == name


def test_dir_lists_all_public_names():
    assert set(accmt.__all__) <= set(dir(accmt))
    assert {"accelerator", "seed_everything"} <= set(dir(accmt))


def test_public_names_for_type_checkers_are_those_at_run_time():
    import ast

    tree = ast.parse(Path(accmt.__file__).read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    imported = {a.asname: n.module for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert imported == accmt._HOMES


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'accmt' has no attribute 'Trayner'"):
        _ = accmt.Trayner
    assert not hasattr(accmt, "__wrapped__")


def test_seed_everything_is_set_seed():
    assert accmt.seed_everything is accmt.set_seed


BARE = """
import sys
from pathlib import Path
before = set(sys.modules)
import accmt
new = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert new == {"accmt"}, new
assert {name for name in sys.modules if name.startswith("accmt.")} == {"accmt.installation", "accmt.version"}
"""

NO_EFFECT = """
import os, sys, threading
import numpy, torch
precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
environment, threads = dict(os.environ), torch.get_num_threads()
generator, hook = torch.random.get_rng_state(), sys.excepthook
import accmt
for name in accmt.__all__:
    getattr(accmt, name)
assert accmt.accelerator is None
heavy = {"accelerate", "transformers", "mlflow", "datasets", "pydantic", "tensorboard", "torchmetrics"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import accmt.setup.build, accmt.loop.fit
assert torch.get_float32_matmul_precision() == precision and torch.backends.cudnn.allow_tf32 == cudnn
assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()
assert dict(os.environ) == environment and torch.get_num_threads() == threads
assert torch.equal(torch.random.get_rng_state(), generator) and sys.excepthook is hook
assert threading.active_count() == 1
import accelerate.state
assert not accelerate.state.PartialState._shared_state and not accelerate.state.AcceleratorState._shared_state
"""

QUICK = """
import sys
from pathlib import Path
import torch
before = set(sys.modules)
from accmt import AcceleratorModule, Trainer
new = set(sys.modules) - before
others = {name.partition(".")[0] for name in new} - set(sys.stdlib_module_names)
assert others == {"accmt"}, others
"""
"""What torch has not loaded itself (sympy, torch.distributed.tensor, yaml, accelerate ...) waits for its first use."""


WITHOUT_OPTUNA = """
import sys
sys.modules["optuna"] = None
from accmt import *
from accmt import Trainer
"""


@pytest.mark.parametrize(
    "code",
    [BARE, QUICK, NO_EFFECT, WITHOUT_OPTUNA],
    ids=["nothing is loaded", "only accmt is loaded", "nothing is changed", "optional packages are absent"],
)
def test_importing_has_no_effect(tmp_path, code):
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(accmt.__file__).parents[1]),
    }  # this checkout, also where another one is installed
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
