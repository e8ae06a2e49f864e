"""Check that a training script computes the same on any number of processes, and name what is wrong if it does not.

The script runs up to its first `trainer.fit(...)`, which is the one that is proven: its module and data are trained for
a few steps in several ways, as `Trainer.prove` does; with `--bits`, on 1, 2 and 4 processes, bit for bit. No model,
checkpoint or log is written, except by the script itself before that.
Exit code: 0 all launches compute the same, 1 one differs, 2 not possible.

  accmt prove train.py -- --epochs 3
"""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accmt.cli.arguments import read_number
from accmt.errors import AccmtError, ArgumentError, fail

if TYPE_CHECKING:
    from accmt.addons.prove import Proof
    from accmt.addons.prove.bits import BitsProof

DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps = "optimizer steps of each launch; default: 4"
    parser.add_argument("--steps", type=read_number(at_least=1), default=4, metavar="NUMBER", help=steps)
    samples = "maximum training samples of each launch; default: 64"
    parser.add_argument("--samples", type=read_number(at_least=1), default=64, metavar="NUMBER", help=samples)
    bits = "compare 1, 2 and 4 processes bit for bit, with the script's same_bits, or 8"
    parser.add_argument("--bits", action="store_true", help=bits)
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs="*", help="its arguments, after --")


def run(options: argparse.Namespace) -> int:
    script = Path(options.script)
    if not script.is_file():
        raise fail(
            ArgumentError,
            "accmt prove",
            got=f"{script}: no such file",
            expected="a Python file",
            do="accmt prove train.py",
        )
    found = _prove_script(script, options.arguments, options.steps, options.samples, compares_bits=options.bits)
    print(f"the first trainer.fit, {found.place}\n{found.proof}")
    return 0 if found.proof.is_right else DIFFERENT


class _Proven(BaseException):
    """Ends the script at its `fit`; not an Exception, so that the script does not handle it."""

    def __init__(self, proof: Proof | BitsProof, place: str) -> None:
        self.proof = proof
        self.place = place


def _prove_script(
    script: Path, arguments: list[str], steps: int, samples: int, *, compares_bits: bool = False
) -> _Proven:
    """Run a script with a `Trainer.fit` that proves instead, and return the first proof."""
    from accmt.addons.models_in_fit import as_module
    from accmt.addons.prove import prove
    from accmt.trainer import Trainer

    original: Any = Trainer.fit
    reached: list[str] = []

    def fit(
        self: Any,
        module: Any,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        datamodule: Any = None,
        **kwargs: Any,
    ) -> None:
        calling = traceback.extract_stack(limit=2)[0]
        reached.append(f"{calling.filename}:{calling.lineno}")
        module = as_module(module, kwargs, self.hps)
        data = {"train_dataset": train_dataset, "val_dataset": val_dataset, "datamodule": datamodule}
        size = {"steps": steps, "samples": samples}
        proof = prove(self, module, **data, **size, fit=original, compares_bits=compares_bits)
        raise _Proven(proof, reached[0])

    before = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    Trainer.fit = fit  # type: ignore[method-assign, assignment]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except _Proven as end:
        return end
    except AccmtError:
        raise
    except (Exception, SystemExit) as error:
        if reached:
            raise
        got = f"the script ended before trainer.fit: {type(error).__name__}: {error}"
        raise fail(
            ArgumentError, f"accmt prove {script}", got=got, expected="a script that calls fit", do="run it alone first"
        ) from error
    finally:
        Trainer.fit = original  # type: ignore[method-assign]
        sys.argv, sys.path[:] = before
    got = "the script ended without trainer.fit"
    raise fail(
        ArgumentError,
        f"accmt prove {script}",
        got=got,
        expected="a script that calls fit",
        do="pass the arguments it needs",
    )
