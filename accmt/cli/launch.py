"""Start a training script on one or more processes, on one or more machines.

A single process runs the script directly; several are started and monitored by torchrun. For several machines, run the
same command on each of them with a different --node-rank. Exit code: that of the script (of the process that failed
first), 128 plus the signal number if a signal ended it, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass

from accmt.cli.accelerate_config import apply_config
from accmt.cli.former import FormerFlag
from accmt.cli.strats import STRATEGIES
from accmt.errors import ArgumentError, explain, fail

# ---- Several machines


_PORT = 29500  # torchrun's default
_WHERE = "accmt launch --nodes"
_EXAMPLE = "--nodes 2 --node-rank 0 --address 10.0.0.1, and --node-rank 1 on the other"


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several machines (run the command on each of them)")
    nodes = "number of machines; 1:4 means between 1 and 4, which may change during the run"
    group.add_argument("--nodes", "--num_machines", default="1", metavar="NUMBER", help=nodes)
    rank = "rank of this machine, from 0"
    group.add_argument("--node-rank", "--machine_rank", type=int, metavar="NUMBER", help=rank)
    address = f"address of machine 0, and a free port on it; default port: {_PORT}"
    group.add_argument("--address", "--main_process_ip", metavar="HOST[:PORT]", help=address)
    restarts = "how often to restart all processes after one failed; a run continues from its newest checkpoint"
    group.add_argument("--max-restarts", "--max_restarts", type=int, default=0, metavar="NUMBER", help=restarts)


@dataclass(frozen=True)
class Machines:
    """The machines of a launch.

    Attributes:
        least: The minimum number of machines.
        most: The maximum number of machines.
        rank: The rank of this machine.
        host: The address of machine 0; None with a single machine.
        port: A free port on machine 0.
        max_restarts: How often processes are restarted.
    """

    least: int
    most: int
    rank: int
    host: str | None
    port: int
    max_restarts: int

    @property
    def needs_launcher(self) -> bool:
        """Whether even a single process needs torchrun."""
        return self.most > 1 or self.max_restarts > 0

    def for_torchrun(self) -> list[str]:
        """Return the arguments of torchrun.

        If the number of machines is fixed, they keep their ranks. If processes may restart, they rendezvous at the
        first machine each time and get new ranks.
        """
        restarts = [f"--max-restarts={self.max_restarts}"] if self.max_restarts else []
        if self.most == 1:
            return ["--standalone", *restarts]
        if self.least == self.most and not restarts:
            ranks = [f"--nnodes={self.most}", f"--node-rank={self.rank}"]
            return [*ranks, f"--master-addr={self.host}", f"--master-port={self.port}"]
        host = f"[{self.host}]" if ":" in str(self.host) else self.host
        meeting = [f"--rdzv-endpoint={host}:{self.port}", f"--rdzv-conf=is_host={self.rank == 0}".lower()]
        # The default is the name of this host, which other machines may not be able to resolve. So name the address of
        # this machine in the network of the first one, if that can be reached.
        with suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(str(self.host), self.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                meeting.append(f"--local-addr={probe.getsockname()[0]}")
        return [f"--nnodes={self.least}:{self.most}", "--rdzv-backend=c10d", "--rdzv-id=accmt", *meeting, *restarts]


def read_machines(options: argparse.Namespace) -> Machines:
    """Read the options about machines.

    Raises:
        ArgumentError: Options contradict each other, or one is missing.
    """
    least, most = _read_number(options.nodes)
    if options.max_restarts < 0:
        raise fail(
            ArgumentError,
            "accmt launch --max-restarts",
            got=str(options.max_restarts),
            expected="an integer >= 0",
            do="3",
        )
    if most == 1:
        if options.node_rank is not None or options.address is not None:
            raise fail(
                ArgumentError,
                _WHERE,
                got="--node-rank or --address without --nodes",
                expected="the number of machines",
                do=_EXAMPLE,
            )
        return Machines(1, 1, 0, None, _PORT, options.max_restarts)
    if options.node_rank is None or options.address is None:
        got = f"{options.nodes} without --node-rank or --address"
        raise fail(ArgumentError, _WHERE, got=got, expected="both of them", do=_EXAMPLE)
    if not 0 <= options.node_rank < most:
        got, expected = str(options.node_rank), f"an integer from 0 to {most - 1}"
        raise fail(ArgumentError, "accmt launch --node-rank", got=got, expected=expected, do=_EXAMPLE)
    if options.strat in ("hsdp", "tp") and least != most:
        do = f"--nodes {most}; or --strat fsdp2, which supports any number of processes"
        got = f"--strat {options.strat}"
        raise fail(ArgumentError, f"{_WHERE} {options.nodes}", got=got, expected="groups of a fixed size", do=do)
    # Split host and port; an IPv6 address with a port must be in brackets.
    match = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\d+))?", options.address)
    is_plain_ipv6 = match is None and options.address.count(":") > 1 and "[" not in options.address
    host, port = (options.address, None) if is_plain_ipv6 else (match[1], match[2]) if match else ("", None)
    if not host or int(port or _PORT) > 65535:
        expected = "a host, or a host and a port: 10.0.0.1:29500 or [fd00::1]:29500"
        raise fail(ArgumentError, "accmt launch --address", got=repr(options.address), expected=expected, do=_EXAMPLE)
    return Machines(least, most, options.node_rank, host.strip("[]"), int(port or _PORT), options.max_restarts)


def _read_number(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise fail(
            ArgumentError, _WHERE, got=repr(text), expected="an integer >= 1, or a range such as 1:4", do="--nodes 2"
        )
    return least, most


def describe_lost_machines(error: Exception) -> str:
    """Return the error message about machines that could not connect or lost their connection."""
    got = f"they could not connect, or lost the connection: {str(error).partition(chr(10))[0]}"
    expected = "all machines started with the same --nodes and --address, which they can reach over the network"
    return explain("the machines of the run", got, expected, 'restart all of them; resume="auto" continues the run')


_COMMANDS = ("sft", "prefer")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    number = "number of processes on this machine; default: one per GPU; 2: is a slice, of all GPUs but the first two"
    parser.add_argument("-N", dest="num_processes", type=_read_count, metavar="NUMBER", help=number)
    gpus = "indices of the GPUs to use; all: the default; available: those without processes"
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpus", type=_read_gpus, metavar="0,1", help=gpus)
    where.add_argument("--cpu", action="store_true", help="use no GPU; the default is then one process")
    former = 'Trainer(profiler="simple") in the script'
    parser.add_argument("--debug-timings", action=FormerFlag, nargs=0, const=former)
    parser.add_argument("-n", action=FormerFlag, nargs="?", const="--gpus 0,1, or leave it out for all GPUs")
    strategy = f"one of {', '.join(STRATEGIES)}; default: single for one process, ddp for several"
    parser.add_argument("--strat", type=_read_strategy, metavar="STRATEGY", help=strategy)
    config = "a file of `accelerate config`; options that are typed take precedence"
    parser.add_argument("--config_file", "--config-file", metavar="FILE", help=config)
    parser.set_defaults(environment={})
    replicate = "number of groups with --strat hsdp; default: 2"
    parser.add_argument("--replicate", type=int, default=2, metavar="NUMBER", help=replicate)
    split = "number of processes that split each layer with --strat tp; default: 2"
    parser.add_argument("--tp", type=int, default=2, metavar="NUMBER", help=split)
    add_machine_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the command without running it")
    parser.add_argument("script", help="the script to run, or the command sft")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def run(options: argparse.Namespace) -> int:
    _resolve(options)
    command, environment = build_command(options), _environment(options)
    if options.dry_run:
        print(shlex.join([*(f"{name}={value}" for name, value in environment.items()), *command]))
        return 0
    indices = [int(gpu) for gpu in options.gpus or () if gpu.isdecimal()]
    if indices and max(indices) >= _num_gpus():  # else the script would silently train on the CPU
        got, do = f"{','.join(options.gpus)} with {_num_gpus()} GPUs", "GPU indices, which start at 0; or --cpu"
        raise fail(ArgumentError, "accmt launch --gpus", got=got, expected="GPUs of this machine", do=do)
    os.environ.update(environment)
    if _strategy(options) == "single":
        sys.stdout.flush()
        os.execv(command[0], command)  # so that the script gets all signals and returns its exit code
    # Run torchrun in this process, to get the exit code of the process that failed.
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        torchrun.main(command[3:])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    except (RendezvousError, DistError) as error:
        print(describe_lost_machines(error), file=sys.stderr)
        return 1
    return 0


def _resolve(options: argparse.Namespace) -> None:
    """Replace a file of `accelerate config` and a slice of GPUs by what they stand for."""
    if "." in (options.strat or ""):
        options.config_file, options.strat = options.strat, None
    if isinstance(options.num_processes, slice):
        gpus = (options.gpus or list(map(str, range(_num_gpus()))))[options.num_processes]
        if options.cpu or not gpus:
            got, do = f"a slice without GPUs, of {_num_gpus()}", "-N 2, a number of processes"
            raise fail(ArgumentError, "accmt launch -N", got=got, expected="GPUs in the slice", do=do)
        options.gpus, options.num_processes = gpus, None
    if options.config_file:
        options.environment = {**options.environment, **apply_config(options.config_file, options)}


def build_command(options: argparse.Namespace) -> list[str]:
    """Return the command that runs the script, as a list of arguments without shell quoting."""
    number = _count_processes(options)
    script = [options.script, *options.arguments]
    if not os.path.isfile(options.script):  # noqa: PTH113 - not a Path, because the script is passed as typed
        if options.script not in _COMMANDS:
            expected, do = f"a Python file, or one of {', '.join(_COMMANDS)}", "accmt launch train.py"
            raise fail(ArgumentError, f"accmt launch {options.script}", got="no such file", expected=expected, do=do)
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
        raise fail(ArgumentError, "accmt launch -N", got=str(number), expected="an integer >= 1", do="-N 2")
    machines = read_machines(options)
    if options.strat == "hsdp":
        of_all, replicate = number * machines.most, options.replicate
        if replicate < 1 or of_all % replicate or of_all == replicate:
            got, do = f"{of_all} processes in {replicate} groups", "for example -N 4 --replicate 2; or --strat fsdp2"
            raise fail(
                ArgumentError, "accmt launch --strat hsdp", got=got, expected="groups of equal size, at least 2", do=do
            )
    if options.strat == "tp" and (options.tp < 2 or number % options.tp):
        # A tensor-parallel group, which exchanges activations in every layer, must fit on one machine.
        got, do = f"--tp {options.tp} with {number} processes per machine", "for example -N 4 --tp 2; or --strat fsdp2"
        raise fail(
            ArgumentError, "accmt launch --strat tp", got=got, expected="an integer >= 2 that divides them", do=do
        )
    if options.strat == "single" and (number > 1 or machines.needs_launcher):
        got = f"-N {number}, --nodes {machines.most}" if machines.needs_launcher else f"-N {number}"
        raise fail(ArgumentError, "accmt launch --strat single", got=got, expected="one process", do="--strat ddp")
    if num_gpus and number > num_gpus:
        do = f"-N {num_gpus}, or --cpu"
        raise fail(
            ArgumentError, "accmt launch -N", got=f"{number} for {num_gpus} GPUs", expected="one GPU per process", do=do
        )
    return int(number)


def _strategy(options: argparse.Namespace) -> str:
    is_single = _count_processes(options) == 1 and not read_machines(options).needs_launcher
    return options.strat or ("single" if is_single else "ddp")


def _environment(options: argparse.Namespace) -> dict[str, str]:
    number = _count_processes(options) * read_machines(options).most
    sizes: dict[str, int] = {}
    if options.strat == "hsdp":
        sizes = {"DP_REPLICATE": options.replicate, "DP_SHARD": number // options.replicate}
    if options.strat == "tp":
        sizes = {"TP": options.tp} | ({"DP_SHARD": number // options.tp} if number > options.tp else {})
    own = {}  # the variables that `accelerate launch` sets for FSDP2 and for the sizes of the device mesh
    if options.strat == "fsdp2" or "DP_SHARD" in sizes:
        own = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    if sizes:
        own["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    own |= {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items()}
    added: dict[str, str] = options.environment
    return _devices(options) | own | added


def _devices(options: argparse.Namespace) -> dict[str, str]:
    if options.cpu:
        return {"ACCELERATE_USE_CPU": "true"}
    if not options.gpus:
        return {}
    visible = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]  # --gpus indexes into it, if set
    own = dict(zip(map(str, range(len(visible))), visible, strict=True))
    return {_VISIBLE: ",".join(own.get(number, number) for number in options.gpus)}


def _read_count(text: str) -> int | slice:
    try:
        if ":" not in text:
            return int(text)
        return slice(*[int(bound) if bound.strip() else None for bound in text.split(":")])
    except (ValueError, TypeError) as error:
        message = f"expected a number, or a slice of GPUs such as 2:, got {text!r}"
        raise argparse.ArgumentTypeError(message) from error


def _read_strategy(text: str) -> str:
    if "." in text or text in STRATEGIES:  # a file of `accelerate config`, as in the original accmt
        return text
    for name, strategy in (("ddp-", "ddp"), ("fsdp", "fsdp2"), ("deepspeed", "fsdp2")):
        if text.startswith(name):
            precision = next((part for part in ("bf16", "fp16") if part in text), None)
            also = f', with Trainer(mixed_precision="{precision}")' if precision else ""
            raise argparse.ArgumentTypeError(f"{text!r} is none; write --strat {strategy}{also}")
    expected = f"one of {', '.join(STRATEGIES)}, or a file of `accelerate config`"
    raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")


def _read_gpus(text: str) -> list[str] | None:
    if text == "all":
        return None
    if text == "available":
        return _find_free_gpus()
    numbers = text.split(",")
    if not all(number.isdecimal() for number in numbers) or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"expected unique GPU indices such as 0,1, got {text!r}")
    return numbers


def _find_free_gpus() -> list[str]:
    """Return the UUIDs of the GPUs without processes: CUDA may number them in another order than `nvidia-smi`."""
    from accmt.addons.gpu_processes import list_gpus, list_processes

    gpus, processes = list_gpus(), list_processes()
    visible = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]
    free = []
    for uuid, index in gpus.items():
        if uuid not in processes and (not visible or uuid in visible or index in visible):
            free.append(uuid)
    if not free:
        got = "no GPU without processes" if gpus else "no GPUs of `nvidia-smi`"
        raise argparse.ArgumentTypeError(f"{got}; write --gpus with the indices to share, or --cpu")
    return free


def _num_gpus() -> int:
    import torch

    return torch.accelerator.device_count()
