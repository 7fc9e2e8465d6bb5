"""Cluster files and the GPU table: what loads, and what each mistake is told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.gpus import gpu_by_device_name, gpu_table

EXAMPLES = Path(__file__).parents[1] / "examples" / "clusters"
CARD = {"dense_tflops": 200, "memory_gb": 24, "network_gb_per_s": 12.5}


def cluster_of(*nodes: dict[str, Any], **fields: Any) -> Cluster:
    return Cluster.from_mapping({"nodes": list(nodes), **fields}, "c.yaml")


@pytest.mark.parametrize(
    ("file", "world_size", "models"),
    [
        ("8xh100-8xa100.yaml", 16, {"H100-SXM", "A100-SXM-80GB"}),
        ("2-fast-2-slow.yaml", 4, {"fast", "slow"}),
        ("128-gpus-4-models.yaml", 128, {"H100-SXM", "A100-SXM-80GB", "A800-SXM-80GB", "L40S"}),
    ],
)
def test_example_clusters_load(file: str, world_size: int, models: set[str]) -> None:
    cluster = Cluster.load(EXAMPLES / file)

    assert cluster.world_size == world_size
    assert set(cluster.gpus) == models
    assert [device.rank for device in cluster.devices] == list(range(world_size))


def test_ranks_count_node_by_node_in_listed_order() -> None:
    cluster = cluster_of(
        {"name": "a", "gpus": ["L40S", "H100-SXM"], "count": 2},
        {"name": "b", "gpus": {"L4": 1}},
        inter_gb_per_s=25,
    )

    assert [(d.node, d.gpu) for d in cluster.devices] == [
        ("a-0", "L40S"),
        ("a-0", "H100-SXM"),
        ("a-1", "L40S"),
        ("a-1", "H100-SXM"),
        ("b", "L4"),
    ]
    assert cluster.ranks_by_node == {"a-0": (0, 1), "a-1": (2, 3), "b": (4,)}


def test_three_numbers_describe_a_gpu_and_the_rest_is_marked_assumed() -> None:
    cluster = cluster_of({"name": "a", "gpus": ["mine", "mine"]}, gpus={"mine": CARD})

    gpu = cluster.gpu(0)
    assert gpu.dense_tflops.origin == "spec"
    assert gpu.memory_gb_per_s.origin == "assumed"
    assert gpu.rate("gemm").origin == "assumed"
    assert cluster.devices[0].in_node_gb_per_s == 12.5


def test_efficiency_can_be_given_for_a_card() -> None:
    card = CARD | {"efficiency": {"gemm": {"value": 0.5, "origin": "measured", "source": "us"}}}
    cluster = cluster_of({"name": "a", "gpus": ["mine"]}, gpus={"mine": card})

    assert cluster.gpu(0).rate("gemm").value == 100e12
    assert cluster.gpu(0).rate("gemm").origin == "measured"


def test_the_node_file_goes_before_the_cards_own_links() -> None:
    node = {"name": "a", "gpus": ["H100-SXM", "L40S"]}
    own = cluster_of(node)
    given = cluster_of(node | {"intra_gb_per_s": 10})

    assert [device.in_node_gb_per_s for device in own.devices] == [450, 32]
    assert [device.in_node_gb_per_s for device in given.devices] == [10, 10]


def test_digest_ignores_the_order_of_keys_and_sees_every_figure() -> None:
    node = {"name": "a", "gpus": {"L4": 1, "L40S": 1}, "intra_gb_per_s": 20}
    shuffled = {"intra_gb_per_s": 20, "gpus": {"L40S": 1, "L4": 1}, "name": "a"}

    assert cluster_of(node).digest == cluster_of(shuffled).digest
    assert cluster_of(node).digest != cluster_of(node | {"intra_gb_per_s": 21}).digest


A = {"name": "a", "gpus": {"H100-SXM": 1}}


@pytest.mark.parametrize(
    ("content", "needles"),
    [
        ({}, ["nodes is missing"]),
        ({"nodes": []}, ["nodes is empty"]),
        ({"nodes": [{"name": "a", "gpus": []}]}, ["nodes.0.gpus is empty"]),
        ({"nodes": [{"name": "a", "gpus": {"L4": 0}}]}, ["nodes.0.gpus", "L4 has count 0"]),
        ({"nodes": [{"name": "a", "gpus": {"H100": 8}}]}, ["'H100'", "H100-SXM, H100-PCIe"]),
        ({"nodes": [A, A], "inter_gb_per_s": 9}, ["nodes.name a stands twice"]),
        ({"nodes": [A, A | {"name": "b"}]}, ["nodes.0.inter_gb_per_s", "node a is not connected"]),
        ({"nodes": [A | {"intra_gb_per_s": -3}]}, ["nodes.0.intra_gb_per_s is -3", "than 0"]),
        ({"nodes": [A | {"intra_gb_per_s": float("nan")}]}, ["is nan", "finite"]),
        ({"nodes": [A | {"count": 16385}]}, ["16385 GPUs", "16384"]),
        ({"nodes": [A | {"bandwidth": 3}]}, ["nodes.0.bandwidth is no field here"]),
        ({"nodes": [A], "gpus": {"x": {"memory_gb": 1}}}, ["gpus.x.dense_tflops is missing"]),
        ({"nodes": [A], "gpus": {"x": CARD | {"memory_gb": "big"}}}, ["gpus.x.memory_gb", "'big'"]),
    ],
)
def test_every_mistake_names_file_field_and_what_fits(
    content: dict[str, Any], needles: list[str]
) -> None:
    start = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        Cluster.from_mapping(content, "c.yaml")

    assert str(caught.value).startswith("c.yaml: ")
    assert "\n" not in str(caught.value)
    for needle in needles:
        assert needle in str(caught.value)
    assert time.perf_counter() - start < 1


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("nodes: [", encoding="utf-8")

    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        Cluster.load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"broken\.yaml: is no valid \.yaml"):
        Cluster.load(broken)


def test_table_holds_dense_peaks() -> None:
    peaks = {name: gpu.dense_tflops.value for name, gpu in gpu_table().items()}

    # sparse peaks are twice the dense ones, so one sparse entry breaks a ratio
    assert 3.0 < peaks["H100-SXM"] / peaks["A100-SXM-80GB"] < 3.4
    assert peaks["H200-SXM"] == peaks["H100-SXM"] > peaks["H100-PCIe"]
    assert 1.0 < peaks["L40S"] / peaks["A100-SXM-80GB"] < 1.3
    assert 0.9 < peaks["A10"] / peaks["L4"] < 1.1
    assert 2.0 < peaks["B200"] / peaks["H100-SXM"] < 2.6
    assert peaks["A800-SXM-80GB"] == peaks["A100-PCIe-40GB"] == 312


def test_every_number_of_the_table_has_a_source() -> None:
    for gpu in gpu_table().values():
        for figure in (gpu.dense_tflops, gpu.memory_gb, gpu.memory_gb_per_s, gpu.pcie_gb_per_s):
            assert figure is not None
            assert len(figure.source) > len("sheet")


def test_a_card_without_bf16_says_why_it_cannot_run() -> None:
    unrunnable = {name: gpu.reason for name, gpu in gpu_table().items() if not gpu.runnable}

    assert list(unrunnable) == ["V100-SXM-32GB"]
    assert "bf16" in str(unrunnable["V100-SXM-32GB"])


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200-SXM"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA A10G", None),
        ("NVIDIA L40", None),
    ],
)
def test_cards_are_known_by_what_cuda_calls_them(device_name: str, name: str | None) -> None:
    assert gpu_by_device_name(device_name) == name
