"""The commands that start a plan's processes, run for real."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pool import free_port
from typer.testing import CliRunner

from hexiseq_triton.cli import app
from hexiseq_triton.errors import ConfigError, PlanError
from hexiseq_triton.launch import node_commands, ranks_per_node, sbatch_file
from hexiseq_triton.planner import (
    Cluster,
    GroupPlan,
    IdleRank,
    Plan,
    ReplicaPlan,
    Split,
    plan,
)

PROGRAM = ("hexiseq", "train", "--plan", "plan.json", "--config", "my train.yaml")


def on_nodes(plan: Plan, *nodes: str) -> Plan:
    """Return the plan with its ranks on the named nodes, in rank order."""
    replicas = tuple(
        ReplicaPlan(
            tuple(
                GroupPlan(tuple(replace(s, node=nodes[s.rank]) for s in group.ranks))
                for group in replica.groups
            ),
            replica.sequences,
        )
        for replica in plan.replicas
    )
    return replace(plan, replicas=replicas)


def three_and_one() -> Plan:
    plan = Plan.from_splits([Split((5, 4, 3), (2, 1, 1)), Split((8,), (4,))])
    return on_nodes(plan, "fast", "fast", "fast", "slow")


def test_each_node_starts_as_many_processes_as_it_has_ranks() -> None:
    commands = node_commands(three_and_one(), ["a", "b"], PROGRAM, port=1234)

    assert [command.host for command in commands] == ["a", "b"]
    assert commands[0].line == (
        "torchrun --nnodes=2 --node-rank=0 --nproc-per-node=3 --rdzv-backend=static "
        "--rdzv-endpoint=a:1234 --no-python hexiseq train --plan plan.json --config 'my train.yaml'"
    )
    assert "--node-rank=1 --nproc-per-node=1 " in commands[1].line
    assert "--rdzv-endpoint=a:1234" in commands[1].line


def test_a_plan_without_nodes_runs_on_one_host() -> None:
    plan = Plan.from_splits([Split((5, 4), (2, 2))], world_size=4)

    (command,) = node_commands(plan, ["here"], PROGRAM)

    assert "--nnodes=1" in command.arguments
    assert "--nproc-per-node=4" in command.arguments


def test_an_idle_rank_of_no_node_runs_beside_the_rank_before_it() -> None:
    plan = Plan.from_splits([Split((5, 4), (2, 2), ranks=(0, 2))], world_size=4)

    assert ranks_per_node(on_nodes(plan, "a", "", "b")) == [("a", 2), ("b", 2)]


def test_an_idle_rank_runs_on_its_own_node() -> None:
    cluster = {
        "inter_gb_per_s": 1,
        "nodes": [
            {"name": "a", "gpus": ["slow"]},
            {"name": "b", "gpus": ["fast", "slow"]},
            {"name": "c", "count": 2, "gpus": ["slow"]},
        ],
        "gpus": {
            "fast": {"dense_tflops": 900, "memory_gb": 80, "network_gb_per_s": 1},
            "slow": {"dense_tflops": 1, "memory_gb": 80, "network_gb_per_s": 1},
        },
    }
    made = plan(Cluster.from_mapping(cluster), "tiny", seq_len=4096, global_batch=1)

    assert [share.rank for share in made.shares] == [1]
    assert made.idle == tuple(
        IdleRank(rank, "slow", node) for rank, node in ((0, "a"), (2, "b"), (3, "c-0"), (4, "c-1"))
    )
    assert ranks_per_node(made) == [("a", 1), ("b", 2), ("c-0", 1), ("c-1", 1)]


def test_a_wrong_number_of_hosts_names_hosts_and_nodes() -> None:
    with pytest.raises(
        ConfigError,
        match=r"1 host \(a\); the plan has 2 nodes: fast \(3 ranks\), slow \(1 rank\)",
    ):
        node_commands(three_and_one(), ["a"], PROGRAM)


def test_a_host_that_stands_twice_is_refused_unless_it_is_this_machine() -> None:
    with pytest.raises(ConfigError, match=r"--hosts names a 2 times.*localhost for all"):
        node_commands(three_and_one(), ["a", "a"], PROGRAM)

    for host in ("localhost", "127.0.0.1", "::1"):
        assert len(node_commands(three_and_one(), [host, host], PROGRAM)) == 2


def test_ranks_that_go_back_and_forth_between_nodes_are_refused() -> None:
    plan = on_nodes(Plan.from_splits([Split((5, 4, 3), (2, 1, 1))]), "a", "b", "a")

    with pytest.raises(PlanError, match="nodes a, b, a, in rank order"):
        node_commands(plan, ["x", "y"], PROGRAM)


def test_a_plan_that_the_runtime_refuses_is_not_launched(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    replace(three_and_one(), executable=False, notes=("only to be looked at",)).save(path)

    result = CliRunner().invoke(app, ["launch", "--plan", str(path), "--hosts", "a,b"])

    assert result.exit_code == 2
    assert "the plan cannot be carried out: only to be looked at" in result.stderr
    assert result.stdout == ""


def executable(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


@pytest.mark.skipif(sys.platform == "win32", reason="the lines are for a POSIX shell")
def test_the_lines_run_every_rank_of_the_plan_on_its_node(tmp_path: Path) -> None:
    script = f"#!{sys.executable}\nimport os\nfrom pathlib import Path\n" + (
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'NODE')\n"
        f"Path({str(tmp_path)!r}, 'rank' + os.environ['RANK']).write_text("
        "' '.join(os.environ[name] for name in names))\n"
    )
    executable(tmp_path / "hexiseq", script)
    commands = node_commands(
        three_and_one(), ["127.0.0.1", "127.0.0.1"], ["hexiseq"], port=free_port()
    )
    path = os.pathsep.join((str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]))

    running = [
        subprocess.Popen(
            command.arguments, env=os.environ | {"PATH": path, "NODE": node}, cwd=tmp_path
        )
        for command, node in zip(commands, ("fast", "slow"), strict=True)
    ]

    assert [process.wait(timeout=300) for process in running] == [0, 0]
    assert [(tmp_path / f"rank{rank}").read_text("utf-8") for rank in range(4)] == [
        "0 0 4 fast",
        "1 1 4 fast",
        "2 2 4 fast",
        "3 0 4 slow",
    ]


@pytest.mark.parametrize("failing", [None, "a", "b"])
def test_the_batch_file_runs_each_line_on_its_host_and_fails_with_any(
    tmp_path: Path, failing: str | None
) -> None:
    """`srun` is replaced by a script that notes what it should have started."""
    executable(
        tmp_path / "srun",
        f'#!/bin/bash\necho "$@" >> {tmp_path}/started\n[[ "$*" != *--nodelist={failing}\\ * ]]\n',
    )
    batch = tmp_path / "job.sbatch"
    batch.write_text(sbatch_file(node_commands(three_and_one(), ["a", "b"], PROGRAM)), "utf-8")

    env = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    ended = subprocess.run(["bash", batch], env=env, timeout=300, check=False)

    started = sorted((tmp_path / "started").read_text("utf-8").splitlines())
    assert [line.split(" torchrun ")[0] for line in started] == [
        f"--nodes=1 --ntasks=1 --nodelist={host}" for host in "ab"
    ]
    assert (ended.returncode != 0) == (failing is not None)


def test_training_outside_torchrun_names_the_command_to_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)

    result = CliRunner().invoke(app, ["train", "--plan", "my p.json", "--config", "t.yaml"])

    assert result.exit_code == 2
    assert "`hexiseq launch --plan 'my p.json' --config t.yaml --hosts" in result.stderr


def test_the_command_prints_every_line_and_writes_the_batch_file(tmp_path: Path) -> None:
    plan, batch = tmp_path / "plan.json", tmp_path / "job.sbatch"
    three_and_one().save(plan)
    arguments = ["launch", "--plan", str(plan), "--hosts", "a, b", "--config", "t.yaml"]

    printed = CliRunner().invoke(app, arguments)
    written = CliRunner().invoke(app, [*arguments, "--sbatch", str(batch)])

    assert printed.exit_code == written.exit_code == 0
    program = ("hexiseq", "train", "--plan", str(plan), "--config", "t.yaml")
    commands = node_commands(three_and_one(), ["a", "b"], program)
    for command in commands:
        assert f"# on {command.host}\n{command.line}\n" in written.stdout
    assert batch.read_text("utf-8") == sbatch_file(commands)
    assert printed.stdout.startswith(written.stdout)
    assert printed.stdout.endswith(sbatch_file(commands))
