"""What `accmt launch` says of several machines, and what torchrun is started with for them."""

from __future__ import annotations

import argparse
import re
import socket
from dataclasses import dataclass

from accmt.errors import ArgumentError, explain

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
