"""Start a training script on one process or several, on this machine or on several.

One process becomes the script itself. Several are started and watched by torchrun. On several machines the same command
runs on each, with its own --node-rank. Exit code: that of the script (of
the process that failed first), 128 and the number of the signal that ended it, 2 for wrong use.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from accmt.cli.machines import add_machine_arguments, describe_lost_machines, read_machines
from accmt.cli.strats import STRATEGIES
from accmt.errors import ArgumentError, explain

_COMMAND = "sft"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    number = "processes on this machine; default: one per GPU"
    parser.add_argument("-N", dest="num_processes", type=int, metavar="NUMBER", help=number)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpus", type=_read_gpus, metavar="0,1", help="the GPUs to use, by their numbers; default: all")
    where.add_argument("--cpu", action="store_true", help="use no GPU; default number of processes: one")
    parser.add_argument("--strat", choices=STRATEGIES, help="default: single for one process, ddp for several")
    parser.add_argument("--replicate", type=int, default=2, metavar="NUMBER", help="groups of --strat hsdp; default: 2")
    split = "processes that split each layer with --strat tp; default: 2"
    parser.add_argument("--tp", type=int, default=2, metavar="NUMBER", help=split)
    add_machine_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the command without running it")
    parser.add_argument("script", help="the script to run; or sft, the command")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def run(options: argparse.Namespace) -> int:
    command, environment = build_command(options), _environment(options)
    if options.dry_run:
        print(shlex.join([*(f"{name}={value}" for name, value in environment.items()), *command]))
        return 0
    _require_gpus(options.gpus)
    os.environ.update(environment)
    if _strategy(options) == "single":
        sys.stdout.flush()
        os.execv(command[0], command)  # signals and exit code are then the script's own
    return _run_group(command[3:])


def build_command(options: argparse.Namespace) -> list[str]:
    """Return the command that runs the script, as a list of arguments that no shell reads."""
    number = _count_processes(options)
    script = [options.script, *options.arguments]
    if not os.path.isfile(options.script):  # noqa: PTH113 - no Path: the script is passed as it was typed
        if options.script != _COMMAND:
            expected, do = f"a Python file, or `{_COMMAND}`", "accmt launch train.py"
            raise ArgumentError(explain(f"accmt launch {options.script}", "no such file", expected, do))
        script = ["-m", "accmt.cli.main", *script]
    machines = read_machines(options)
    if _strategy(options) == "single":
        return [sys.executable, *script]
    torchrun = ["torch.distributed.run", *machines.for_torchrun(), f"--nproc-per-node={number}"]
    return [sys.executable, "-m", *torchrun, f"--signals-to-handle={_SIGNALS}", *script]


def _count_processes(options: argparse.Namespace) -> int:
    number = options.num_processes
    num_gpus = 0 if options.cpu else len(options.gpus) if options.gpus else _num_gpus()
    if number is None:
        number = 1 if options.strat == "single" else max(num_gpus, 1)
    if number < 1:
        raise ArgumentError(explain("accmt launch -N", str(number), "a number from 1", "-N 2"))
    machines = read_machines(options)
    if options.strat == "hsdp":
        _require_groups(number * machines.most, options.replicate)
    if options.strat == "tp":
        _require_split(number, options.tp)
    if options.strat == "single" and (number > 1 or machines.needs_launcher):
        got = f"-N {number}, --nodes {machines.most}" if machines.needs_launcher else f"-N {number}"
        raise ArgumentError(explain("accmt launch --strat single", got, "one process", "--strat ddp"))
    if num_gpus and number > num_gpus:
        do = f"-N {num_gpus}, or --cpu"
        raise ArgumentError(explain("accmt launch -N", f"{number} for {num_gpus} GPUs", "one GPU per process", do))
    return int(number)


def _require_groups(number: int, replicate: int) -> None:
    if replicate < 1 or number % replicate or number == replicate:
        got, do = f"{number} processes in {replicate} groups", "-N 4 --replicate 2, say; or --strat fsdp2"
        raise ArgumentError(explain("accmt launch --strat hsdp", got, "groups of the same size, from 2", do))


def _require_split(number: int, size: int) -> None:
    """Check that groups which split layers, and exchange activations in each of them, are on one machine each."""
    if size < 2 or number % size:
        got, do = f"--tp {size} on {number} processes of a machine", "-N 4 --tp 2, say; or --strat fsdp2"
        raise ArgumentError(explain("accmt launch --strat tp", got, "a number from 2 that divides them", do))


def _strategy(options: argparse.Namespace) -> str:
    is_single = _count_processes(options) == 1 and not read_machines(options).needs_launcher
    return options.strat or ("single" if is_single else "ddp")


def _environment(options: argparse.Namespace) -> dict[str, str]:
    return _devices(options) | _sharding(options)


def _sharding(options: argparse.Namespace) -> dict[str, str]:
    """Return what `accelerate launch` sets for FSDP2, and for the sizes of the mesh of processes."""
    number = _count_processes(options) * read_machines(options).most
    sizes: dict[str, int] = {}
    if options.strat == "hsdp":
        sizes = {"DP_REPLICATE": options.replicate, "DP_SHARD": number // options.replicate}
    if options.strat == "tp":
        sizes = {"TP": options.tp} | ({"DP_SHARD": number // options.tp} if number > options.tp else {})
    own = {}
    if options.strat == "fsdp2" or "DP_SHARD" in sizes:
        own = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    if sizes:
        own["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    return own | {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items()}


def _devices(options: argparse.Namespace) -> dict[str, str]:
    if options.cpu:
        return {"ACCELERATE_USE_CPU": "true"}
    if not options.gpus:
        return {}
    visible = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]  # of which numbers count, if it is set
    own = dict(zip(map(str, range(len(visible))), visible, strict=True))
    return {_VISIBLE: ",".join(own.get(number, number) for number in options.gpus)}


def _read_gpus(text: str) -> list[str]:
    numbers = text.split(",")
    if not all(number.isdecimal() for number in numbers) or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"expected different numbers such as 0,1, got {text!r}")
    return numbers


def _require_gpus(gpus: Sequence[str] | None) -> None:
    if gpus and max(map(int, gpus)) >= _num_gpus():  # a script would quietly train on the CPU
        got, do = f"{','.join(gpus)} of the {_num_gpus()} there are", "numbers from 0, each that of a GPU; or --cpu"
        raise ArgumentError(explain("accmt launch --gpus", got, "GPUs of this machine", do))


def _num_gpus() -> int:
    import torch

    return torch.accelerator.device_count()


def _run_group(arguments: Sequence[str]) -> int:
    """Run torchrun in this process, so that the exit code of the process that failed is known."""
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        torchrun.main(list(arguments))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    except (RendezvousError, DistError) as error:
        print(describe_lost_machines(error), file=sys.stderr)
        return 1
    return 0
