"""Measuring a cluster: what comes out is a cluster file that the planner takes as measured."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
import yaml
from pool import Pool, free_port

from hexiseq_triton.commands.profile import _print
from hexiseq_triton.emulation.emulate import Emulation
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner import Cluster, ModelSpec, Plan, Split, plan
from hexiseq_triton.planner.explain import cost_of
from hexiseq_triton.planner.overlap import Overlap
from hexiseq_triton.planner.rates import rates_of
from hexiseq_triton.planner.workload import Workload
from hexiseq_triton.profiling.classes import RankProfile, classes_of
from hexiseq_triton.profiling.cluster_file import cluster_content, cluster_yaml
from hexiseq_triton.profiling.compute import Rate, _skip, measured_shape
from hexiseq_triton.profiling.exchanging import even_ring, exchanging_seconds, waited_seconds
from hexiseq_triton.profiling.links import Link, fitted, pair_rounds
from hexiseq_triton.profiling.profile import (
    CPU_SIZES,
    AllToAll,
    ClusterProfile,
    _check_order,
    num_steps,
    profile,
)
from hexiseq_triton.timeline import Span

H100 = "NVIDIA H100 80GB HBM3"
TINY = replace(
    CPU_SIZES, rows=(16,), lengths=(32,), message_bytes=(2**10, 2**14), budget_seconds=0.002
)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_every_pair_meets_once_in_disjoint_rounds(world: int) -> None:
    rounds = pair_rounds(world)

    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(world), 2))
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)


def test_a_link_is_fitted_to_latency_and_rate() -> None:
    link = fitted({size: 20e-6 + size / 50e9 for size in (2**10, 2**20, 2**24, 2**28)})

    assert link.latency_seconds == pytest.approx(20e-6, rel=1e-6)
    assert link.bytes_per_s == pytest.approx(50e9, rel=1e-6)
    assert link.seconds(50e9) == pytest.approx(1 + 20e-6)
    only_rate = fitted({size: size / 50e9 for size in (2**20, 2**24)})
    assert only_rate.bytes_per_s == pytest.approx(50e9, rel=1e-3)
    only_latency = fitted({2**10: 2e-6, 2**11: 1e-6})
    assert only_latency.bytes_per_s > 0


def rank_profile(
    rank: int, speed: float = 1.0, *, host: str = "a", memory: float = 80e9, label: str = ""
) -> RankProfile:
    rates = (
        Rate("gemm_forward", 1024, 600e12 * speed),
        Rate("gemm_backward", 1024, 550e12 * speed),
        Rate("attention_forward", 4096, 500e12 * speed, 128),
        Rate("attention_backward", 4096, 400e12 * speed, 128),
    )
    return RankProfile(rank, host, H100, memory, 3e12, rates, label)


def test_gpus_that_measure_alike_are_one_model_by_their_median() -> None:
    (found,), lines = classes_of([rank_profile(r, s) for r, s in enumerate((1.0, 1.02, 0.97))])

    assert (found.name, found.ranks, lines) == ("H100-SXM", (0, 1, 2), [])
    assert found.rates[0].flops_per_s == pytest.approx(600e12)


def test_a_rank_that_is_off_is_a_model_of_its_own_and_a_line_says_why() -> None:
    found, lines = classes_of([rank_profile(r, s) for r, s in enumerate((1.0, 1.0, 0.9, 1.0))])

    assert [(each.name, each.ranks) for each in found] == [
        ("H100-SXM", (0, 1, 3)),
        ("H100-SXM.2", (2,)),
    ]
    (line,) = lines
    assert line.startswith(f"rank 2 ({H100}): 90% of the token-wise rate, 90% of the attention")
    assert line.endswith("of ranks 0, 1, 3: named H100-SXM.2")


def test_less_memory_is_another_model_and_emulated_ranks_are_labelled() -> None:
    label = "emulated: 44 of 132 SMs"
    profiles = [
        rank_profile(0),
        rank_profile(1, memory=40e9),
        rank_profile(2, 0.35, label=label),
        rank_profile(3, 0.35, label=label),
    ]
    found, lines = classes_of(profiles)

    by_ranks = {each.ranks: each.name for each in found}
    assert by_ranks[2, 3].endswith("-emulated")
    assert len(set(by_ranks.values())) == 3
    assert any(label in line and "of rank 0" in line for line in lines)
    assert label in yaml.safe_dump(cluster_content(measured_cluster(profiles)))


def test_many_models_stand_side_by_side_with_whole_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiles = [rank_profile(r, 0.8**r, label=f"emulated: {r} SMs") for r in range(10)]
    found = measured_cluster(profiles)
    _print(found, tmp_path / "cluster.yaml")

    printed = capsys.readouterr().out
    assert all(each.name in printed for each in found.classes)
    assert "…" not in printed


def measured_cluster(profiles: list[RankProfile]) -> ClusterProfile:
    classes, lines = classes_of(profiles)
    hosts = tuple(each.host for each in profiles)
    near, far = Link(10e-6, 300e9), Link(25e-6, 20e9)
    links = tuple(
        {
            peer: near if hosts[peer] == hosts[rank] else far
            for peer in range(len(hosts))
            if peer != rank
        }
        for rank in range(len(hosts))
    )
    return ClusterProfile(
        hosts,
        tuple(classes),
        tuple(lines),
        links,
        AllToAll(2e-3, 1.6e-3),
        Overlap(0.03, 0.2, 0.06),
        "llama3-8b",
        12.0,
    )


def test_the_planner_counts_on_what_was_measured(tmp_path: Path) -> None:
    slow = [rank_profile(r, 0.5, host="b") for r in (2, 3)]
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster_yaml(measured_cluster([rank_profile(0), rank_profile(1), *slow])))

    cluster = Cluster.load(path)
    assert [device.gpu for device in cluster.devices] == ["H100-SXM"] * 2 + ["H100-SXM.2"] * 2
    assert all(cluster.assumed(gpu) == {} for gpu in cluster.gpus)
    rates = rates_of(cluster, 128, 65536, 16384)
    assert list(rates.gemm_forward) == pytest.approx([600e12, 600e12, 300e12, 300e12], rel=1e-3)
    assert list(rates.attention_backward) == pytest.approx([400e12] * 2 + [200e12] * 2, rel=1e-3)
    assert list(rates.in_node) == pytest.approx([300e9] * 4, rel=1e-3)
    assert list(rates.across) == pytest.approx([20e9] * 4, rel=1e-3)
    assert list(rates.memory) == pytest.approx([3e12] * 4, rel=1e-3)
    assert set(cluster.gpus["H100-SXM"].device_names) == {H100}
    text = path.read_text()
    assert "1.25 times what the fullest port's link says" in text
    assert "computing takes 0.03 s longer, transfers 0.20 s" in text
    assert rates.overlap == cluster.overlap == Overlap(0.03, 0.2, 0.06)


def layer_seconds(cluster: Cluster, splits: list[Split]) -> float:
    made = Plan.from_splits(splits, num_kv_heads=8, head_dim=128)
    workload = Workload(made.seq_len, global_batch=1, accumulation=1, recompute="none")
    model = replace(ModelSpec.load("llama3-8b"), layers=1)
    return float(cost_of(made, cluster, model, workload).group_seconds.max())


def test_measured_slowdowns_make_exchanging_dearer_and_change_nothing_else() -> None:
    found = measured_cluster([rank_profile(rank) for rank in range(4)])
    slow = Cluster.from_mapping(cluster_content(found))
    content = cluster_content(replace(found, overlap=None))
    assumed = Cluster.from_mapping(content)
    heads, ring = [Split((4096,) * 4, (8,) * 4)], [Split((4096,), (32,))] * 4

    assert layer_seconds(slow, heads) == layer_seconds(assumed, heads)
    assert 1.01 < layer_seconds(slow, ring) / layer_seconds(assumed, ring) < 1.1
    assert slow.digest != assumed.digest
    content["overlap"] = {"compute_slowdown": -0.1}
    with pytest.raises(ConfigError, match=r"overlap.compute_slowdown is -0.1"):
        Cluster.from_mapping(content)


def test_ranks_of_a_host_must_stand_together() -> None:
    _check_order(["a", "a", "b"])
    with pytest.raises(ConfigError, match="number them host by host"):
        _check_order(["a", "b", "a"])


@pytest.mark.parametrize("name", ["7b", "13b", "70b", "llama3-8b"])
def test_layers_are_measured_in_widths_that_suit_tensor_cores(name: str) -> None:
    spec = ModelSpec.load(name)
    shape = measured_shape(spec)
    assert shape.gated
    assert shape.ffn % 128 == 0
    assert shape.parameters_per_layer == pytest.approx(spec.parameters_per_layer, rel=0.01)


def test_skipped_attention_still_makes_all_products() -> None:
    q, k, v = (torch.randn(3, heads, 2, requires_grad=True) for heads in (4, 2, 2))
    out = _skip(q, k, v)
    out.sum().backward()

    assert torch.equal(out, q)
    assert [x.grad.shape for x in (q, k, v) if x.grad is not None] == [q.shape, k.shape, v.shape]


def profiled(rank: int, head_dims: list[int]) -> tuple[ClusterProfile, list[str]]:
    """Worker: measure a tiny layer on the CPU."""
    steps: list[str] = []
    found = profile(torch.device("cpu"), "tiny", head_dims, TINY, step=steps.append)
    return found, steps


def test_every_rank_gets_the_same_profile_and_the_planner_reads_it(
    pool: Pool, tmp_path: Path
) -> None:
    results = pool.run(profiled, [16, 8])

    found, steps = results[0]
    assert all(result[0].links == found.links for result in results)
    assert len(steps) == num_steps(TINY, [16, 8], 5)
    assert found.all_to_all is not None
    assert found.all_to_all.seconds > 0
    assert [set(links) for links in found.links] == [set(range(5)) - {r} for r in range(5)]
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster_yaml(found))
    cluster = Cluster.load(path)
    assert cluster.world_size == 5
    assert {rate.head_dim for gpu in cluster.gpus.values() for rate in gpu.rates} == {None, 8, 16}
    assert plan(cluster, "tiny", seq_len=512, strategy="zigzag_ring").predicted is not None


def profiled_over_slow_links(rank: int) -> ClusterProfile:
    """Worker: the same over links of 10 MB/s."""
    emulation = Emulation(link_gb_per_s=(0.01,) * 5)
    sizes = replace(TINY, message_bytes=(2**14, 2**16), all_to_all_bytes=2**16)
    return profile(torch.device("cpu"), "tiny", [16], sizes, emulation=emulation)


def test_emulated_links_are_measured_as_such(pool: Pool) -> None:
    found = pool.run(profiled_over_slow_links)[0]
    for links in found.links:
        for link in links.values():
            assert link.seconds(2**16) >= 0.99 * 2**16 / 0.01e9


def attention_under_a_ring(rank: int) -> tuple[float, bool]:
    """Worker: time attention that exchanges keys; return seconds, and what is left recorded."""
    with even_ring(80, 4, 2, torch.device("cpu")) as context:
        seconds = exchanging_seconds(context, 16, torch.float32)
        return seconds, context.timeline.enabled or bool(context.timeline.spans())


def test_attention_that_exchanges_keys_counts_without_its_waiting(pool: Pool) -> None:
    spans = [Span("attention", 0.0, 4.0), Span("wait for keys", 4.0, 2.0)]
    assert waited_seconds([*spans, Span("wait for gradients", 6.0, 1.0)]) == 3.0

    for seconds, recorded in pool.run(attention_under_a_ring):
        assert seconds > 0
        assert not recorded


def test_the_command_writes_a_cluster_file(tmp_path: Path) -> None:
    folder = Path(sys.executable).parent
    program = [folder / "hexiseq", "profile", "--model", "tiny", "--head-dims", "16"]
    subprocess.run(
        [
            folder / "torchrun",
            "--nproc-per-node=2",
            f"--master-port={free_port()}",
            "--no-python",
            *program,
        ],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        timeout=300,
        check=True,
    )

    assert Cluster.load(tmp_path / "cluster.yaml").world_size == 2
