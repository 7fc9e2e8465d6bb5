"""The doctor: what it finds on healthy processes, and what it says of sick ones."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from rich.console import Console

from hexiseq_triton.commands.doctor import print_diagnosis
from hexiseq_triton.doctor.examine import Diagnosis, RankReport, diagnosed, examine
from hexiseq_triton.doctor.kernels import KernelPath
from hexiseq_triton.doctor.nccl import NcclLog, read_nccl_log

PATIENCE = timedelta(seconds=3)
WELL = RankReport(
    rank=0,
    host="a",
    device="NVIDIA H100 80GB HBM3",
    memory_bytes=80 * 2**30,
    versions={"torch": "2.11.0", "triton": "3.6.0", "driver": "580.1"},
    peers=(1,),
    local_gpus=2,
    kernels=KernelPath("hopper", "sm_90"),
    nccl=NcclLog("IB", "mlx5_0:1/IB", "P2P/CUMEM"),
    smoke={1: "ok 0.21"},
)


def reports(**change: object) -> list[RankReport]:
    """Return two ranks on two hosts, the second with a change."""
    other = replace(WELL, rank=1, host="b", peers=(0,), smoke={0: "ok 0.20"})
    return [WELL, replace(other, **change)]  # type: ignore[arg-type]


def examined(rank: int) -> Diagnosis:
    """Worker: examine the world on the CPU."""
    return examine(torch.device("cpu"))


def test_healthy_processes_have_no_problem(pool: Pool) -> None:
    results = pool.run(examined)

    found = results[0]
    assert all(result == found for result in results)
    assert found.problems == found.remarks == ()
    assert [report.rank for report in found.reports] == list(range(5))
    for report in found.reports:
        assert set(report.smoke) == set(range(5)) - {report.rank}
        assert report.kernels == KernelPath("reference", "no CUDA device")
        assert report.versions["hexiseq_triton"].endswith(")")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"versions": WELL.versions | {"torch": "2.10.0"}},
            "torch differs: 2.11.0 on rank 0; 2.10.0 on rank 1. Install the same on every host",
        ),
        (
            {"smoke": {0: "3 of 1048576 bytes arrived wrong"}},
            r"rank 1 \(b\) with rank 0 \(a\): 3 of 1048576 bytes arrived wrong. Check that",
        ),
        (
            {"kernels": KernelPath("none", "sm_75", problem="leave this GPU out")},
            r"rank 1 \(NVIDIA H100 80GB HBM3\): leave this GPU out",
        ),
    ],
)
def test_what_must_be_fixed_is_named(change: dict[str, object], message: str) -> None:
    found = diagnosed(reports(**change))

    assert len(found.problems) == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found.problems[0])


def with_a_host_cut_off(rank: int) -> tuple[set[int], float]:
    """Worker: nothing reaches rank 0 or comes from it; return the bad peers and the seconds."""
    sent_and_received = dist.batch_isend_irecv

    def cut(operations: list[dist.P2POp]) -> list[dist.Work]:
        is_cut = 0 in (rank, operations[0].peer)
        return sent_and_received(operations[1:] if is_cut else operations)

    began = time.monotonic()
    with (
        mock.patch("torch.distributed.batch_isend_irecv", cut),
        mock.patch("hexiseq_triton.doctor.examine.SMOKE_TIMEOUT", PATIENCE),
    ):
        own = examine(torch.device("cpu")).reports[rank]
    bad = {peer for peer, result in own.smoke.items() if not result.startswith("ok")}
    return bad, time.monotonic() - began


def test_a_host_that_is_cut_off_is_found_without_a_timeout_for_each_peer(fresh_pool: Pool) -> None:
    found = fresh_pool.run(with_a_host_cut_off)
    assert found[0][0]
    assert any(0 in bad for bad, _ in found[1:])
    assert all(len(bad) <= 1 for bad, _ in found)
    assert max(seconds for _, seconds in found) < 2 * PATIENCE.total_seconds() + 5


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"peers": ()}, "reads 0 of its 1 neighbours' memory directly"),
        ({"nccl": NcclLog("Socket", "eth0:10.0.0.2<0>")}, "TCP sockets (eth0:10.0.0.2<0>)"),
        ({"kernels": KernelPath("portable", "x", remark="Hopper kernels do not run")}, "Hopper"),
    ],
)
def test_what_only_makes_it_slow_is_a_remark(change: dict[str, object], part: str) -> None:
    found = diagnosed(reports(**change))

    assert found.problems == ()
    (remark,) = found.remarks
    assert part in remark


def printed(found: Diagnosis, width: int = 200) -> str:
    page = StringIO()
    print_diagnosis(found, Console(file=page, width=width))
    return page.getvalue()


def test_the_table_has_a_row_a_rank_and_ends_with_the_verdict() -> None:
    text = printed(diagnosed(reports()))
    assert "hopper (sm_90)" in text
    assert "IB, mlx5_0:1/IB, P2P/CUMEM" in text
    assert "2 ranks can work together" in text

    text = printed(diagnosed(reports(versions={"torch": "1"})))
    assert "fix: torch differs" in text
    assert "can work together" not in text


def test_a_narrow_terminal_cuts_no_name_and_no_time() -> None:
    text = printed(diagnosed(reports(host="node-17.cluster.example")), width=60)
    assert "node-17.cluster.example" in text
    assert "…" not in text


def test_nccl_s_log_tells_network_interface_and_ways(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(
        "h:1:2 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>\n"
        "h:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>\n"
        "h:1:2 [0] NCCL INFO Using network IB\n"
        "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
        "h:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
        "h:1:2 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0\n"
    )

    found = read_nccl_log(path)
    assert found.network == "IB"
    assert found.interface.startswith("[0]mlx5_0:1/RoCE")
    assert found.ways == "P2P/CUMEM, NET/IB/0"
    assert read_nccl_log(tmp_path / "none") == NcclLog()
