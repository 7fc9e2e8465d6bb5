"""The commands that start a plan's processes: a torchrun line a node, and an sbatch file.

Nodes may hold different numbers of ranks. Rendezvous is static: process numbers follow the node
ranks, so process i runs rank i of the plan.
"""

from __future__ import annotations

import ipaddress
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from hexiseq_triton.errors import ConfigError, PlanError
from hexiseq_triton.planner import Plan
from hexiseq_triton.wording import counted

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class NodeCommand:
    """The torchrun line of one node."""

    host: str
    arguments: tuple[str, ...]

    @property
    def line(self) -> str:
        return shlex.join(self.arguments)


def node_commands(
    plan: Plan, hosts: Sequence[str], program: Sequence[str], *, port: int = DEFAULT_PORT
) -> list[NodeCommand]:
    """Return the torchrun line of each host, in the plan's order of nodes.

    Args:
        plan: the plan; ranks without a node all run on one host.
        hosts: one for each node of the plan; the first also runs the rendezvous.
        program: what each process runs, `hexiseq train ...` for instance.
        port: a free port of the first host.

    Raises:
        ConfigError: if the plan has another number of nodes, or one host stands for two.
        PlanError: if the plan's ranks don't count up node by node.
    """
    nodes = ranks_per_node(plan)
    if len(hosts) != len(nodes):
        found = ", ".join(f"{name} ({counted(count, 'rank')})" for name, count in nodes)
        raise ConfigError(
            f"--hosts names {counted(len(hosts), 'host')} ({', '.join(hosts)}); the plan has "
            f"{counted(len(nodes), 'node')}: {found}. Name one host for each, in this order"
        )
    for host, times in Counter(hosts).items():
        if times > 1 and not _is_loopback(host):
            raise ConfigError(
                f"--hosts names {host} {times} times; its processes would share GPUs. Name another "
                "host for each node; to rehearse on this machine, localhost for all of them"
            )
    return [
        NodeCommand(
            host,
            (
                "torchrun",
                f"--nnodes={len(nodes)}",
                f"--node-rank={index}",
                f"--nproc-per-node={count}",
                "--rdzv-backend=static",
                f"--rdzv-endpoint={hosts[0]}:{port}",
                "--no-python",
                *program,
            ),
        )
        for index, (host, (_, count)) in enumerate(zip(hosts, nodes, strict=True))
    ]


def _is_loopback(host: str) -> bool:
    """Return whether a host is this machine, where several nodes may be rehearsed."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def ranks_per_node(plan: Plan) -> list[tuple[str, int]]:
    """Return the plan's nodes in rank order, each with its number of ranks.

    An idle rank that the plan puts on no node runs beside the rank before it.
    """
    node_of = {share.rank: share.node or "one host" for share in plan.shares}
    node_of |= {idle.rank: idle.node for idle in plan.idle if idle.node is not None}
    ordered = [node_of[min(node_of)]]
    for rank in range(1, plan.world_size):
        ordered.append(node_of.get(rank, ordered[-1]))
    nodes = [(name, len(list(ranks))) for name, ranks in groupby(ordered)]
    names = [name for name, _ in nodes]
    if len(set(names)) < len(names):
        raise PlanError(
            f"the plan's ranks lie on nodes {', '.join(names)}, in rank order; torchrun numbers "
            "processes node by node: list each node once in the cluster file"
        )
    return nodes


def sbatch_file(commands: Sequence[NodeCommand], *, job_name: str = "hexiseq") -> str:
    """Return a Slurm batch file that runs every line on its host, and fails if one of them does."""
    lines = "\n".join(
        f"srun --nodes=1 --ntasks=1 --nodelist={shlex.quote(command.host)} {command.line} &\n"
        "steps+=($!)"
        for command in commands
    )
    return f"""\
#!/bin/bash
#SBATCH --job-name={job_name}
#SBATCH --nodes={len(commands)}
#SBATCH --nodelist={",".join(command.host for command in commands)}
#SBATCH --exclusive

steps=()
{lines}

status=0
for step in "${{steps[@]}}"; do
    wait "$step" || status=$?
done
exit "$status"
"""
