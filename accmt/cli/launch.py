"""Start a training script on one process or several, on this machine or on several.

One process becomes the script itself. Several are started and watched by torchrun. On several machines the same command
runs on each, with its own --node-rank. Exit code: that of the script (of
the process that failed first), 128 and the number of the signal that ended it, 2 for wrong use.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from accmt.cli.strats import STRATEGIES
from accmt.errors import ArgumentError, explain

# ---- What `accmt launch` says of several machines, and what torchrun is started with for them.


_PORT = 29500  # as torchrun has it
_WHERE = "accmt launch --nodes"
_EXAMPLE = "--nodes 2 --node-rank 0 --address 10.0.0.1, and --node-rank 1 on the other"


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several machines; the command runs on each of them")
    nodes = "how many machines; 1:4 for any number from 1 to 4, which may change"
    group.add_argument("--nodes", "--num_machines", default="1", metavar="NUMBER", help=nodes)
    rank = "the number of this machine, from 0"
    group.add_argument("--node-rank", "--machine_rank", type=int, metavar="NUMBER", help=rank)
    address = f"where machine 0 is reached by all, and a free port there; default: {_PORT}"
    group.add_argument("--address", "--main_process_ip", metavar="HOST[:PORT]", help=address)
    restarts = "how often all processes start again after one failed; a run continues from its newest checkpoint"
    group.add_argument("--max-restarts", "--max_restarts", type=int, default=0, metavar="NUMBER", help=restarts)


@dataclass(frozen=True)
class Machines:
    """The machines of a launch.

    Attributes:
        least: With how many it runs.
        most: With how many it runs at most.
        rank: The number of this one.
        host: Where the first one is reached; None with a single machine.
        port: A free port there.
        max_restarts: How often processes start again.
    """

    least: int
    most: int
    rank: int
    host: str | None
    port: int
    max_restarts: int

    @property
    def needs_launcher(self) -> bool:
        """Whether torchrun is needed also for a single process."""
        return self.most > 1 or self.max_restarts > 0

    def for_torchrun(self) -> list[str]:
        """Return the arguments of torchrun.

        Machines whose number is fixed have the ranks that they were given. Where processes may start again, they meet
        at the first machine each time, and number themselves.
        """
        restarts = [f"--max-restarts={self.max_restarts}"] if self.max_restarts else []
        if self.most == 1:
            return ["--standalone", *restarts]
        if self.least == self.most and not restarts:
            ranks = [f"--nnodes={self.most}", f"--node-rank={self.rank}"]
            return [*ranks, f"--master-addr={self.host}", f"--master-port={self.port}"]
        host = f"[{self.host}]" if ":" in str(self.host) else self.host
        meeting = [f"--rdzv-endpoint={host}:{self.port}", f"--rdzv-conf=is_host={self.rank == 0}".lower()]
        own = _own_address(str(self.host), self.port)
        meeting += (
            [] if own is None else [f"--local-addr={own}"]
        )  # else the name of this host, which others may not know
        return [f"--nnodes={self.least}:{self.most}", "--rdzv-backend=c10d", "--rdzv-id=accmt", *meeting, *restarts]


def read_machines(options: argparse.Namespace) -> Machines:
    """Read what was typed about machines.

    Raises:
        ArgumentError: It contradicts itself, or something is missing.
    """
    least, most = _read_number(options.nodes)
    if options.max_restarts < 0:
        raise ArgumentError(explain("accmt launch --max-restarts", str(options.max_restarts), "a number from 0", "3"))
    if most == 1:
        if options.node_rank is not None or options.address is not None:
            raise ArgumentError(
                explain(_WHERE, "--node-rank or --address without it", "the number of machines", _EXAMPLE)
            )
        return Machines(1, 1, 0, None, _PORT, options.max_restarts)
    if options.node_rank is None or options.address is None:
        got = f"{options.nodes} without --node-rank or --address"
        raise ArgumentError(explain(_WHERE, got, "both beside it", _EXAMPLE))
    if not 0 <= options.node_rank < most:
        got, expected = str(options.node_rank), f"a number from 0 to {most - 1}"
        raise ArgumentError(explain("accmt launch --node-rank", got, expected, _EXAMPLE))
    if options.strat in ("hsdp", "tp") and least != most:
        do = f"--nodes {most}; or --strat fsdp2, which takes any number of processes"
        got = f"--strat {options.strat}"
        raise ArgumentError(explain(f"{_WHERE} {options.nodes}", got, "groups of a fixed size", do))
    host, port = _read_address(options.address)
    return Machines(least, most, options.node_rank, host, port, options.max_restarts)


def _read_number(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ArgumentError(explain(_WHERE, repr(text), "a number from 1, or a range such as 1:4", "--nodes 2"))
    return least, most


def _read_address(text: str) -> tuple[str, int]:
    """Split a host from its port; an IPv6 address that has one stands in brackets."""
    match = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\d+))?", text)
    is_plain_ipv6 = match is None and text.count(":") > 1 and "[" not in text
    host, port = (text, None) if is_plain_ipv6 else (match[1], match[2]) if match else ("", None)
    if not host or int(port or _PORT) > 65535:
        expected = "a host, or a host and a port: 10.0.0.1:29500 or [fd00::1]:29500"
        raise ArgumentError(explain("accmt launch --address", repr(text), expected, _EXAMPLE))
    return host.strip("[]"), int(port or _PORT)


def _own_address(host: str, port: int) -> str | None:
    """Return the address of this machine on the way to another one; None where there is no way."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def describe_lost_machines(error: Exception) -> str:
    """Return the message about machines that did not find one another, or lost one another."""
    got = f"they did not meet, or one is gone: {str(error).partition(chr(10))[0]}"
    expected = "every machine started, with the same --nodes and --address, and a network that lets them reach it"
    return explain("the machines of the run", got, expected, 'start all again; resume="auto" continues the run')


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
