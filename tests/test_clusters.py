"""Cluster files: what loads, and what each mistake is told."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.clusters import Cluster

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
        ("1024-gpus-4-models.yaml", 1024, {"H100-SXM", "A100-SXM-80GB", "A800-SXM-80GB", "L40S"}),
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


def test_shuffled_keys_in_the_file_give_the_same_digest(tmp_path: Path) -> None:
    def shuffled(value: Any, rng: Random) -> Any:
        if isinstance(value, dict):
            keys = rng.sample(sorted(value), len(value))
            return {key: shuffled(value[key], rng) for key in keys}
        return [shuffled(item, rng) for item in value] if isinstance(value, list) else value

    for file in sorted(EXAMPLES.glob("*.yaml")):
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        other = tmp_path / file.name
        other.write_text(yaml.safe_dump(shuffled(content, Random(1)), sort_keys=False))
        assert Cluster.load(other).digest == Cluster.load(file).digest


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
        ({"nodes": 5}, ["nodes is 5", "a list is needed"]),
        ({"nodes": [{"name": "a", "gpus": 5}]}, ["nodes.0.gpus is 5", "mapping of counts"]),
        ({"nodes": [A], "inter_gb_per_s": -1}, ["inter_gb_per_s is -1", "than 0"]),
        ({"nodes": [A, A], "inter_gb_per_s": 9}, ["nodes.name a stands twice"]),
        ({"nodes": [A, A | {"name": "b"}]}, ["nodes.0.inter_gb_per_s", "node a is not connected"]),
        ({"nodes": [A | {"intra_gb_per_s": -3}]}, ["nodes.0.intra_gb_per_s is -3", "than 0"]),
        ({"nodes": [A | {"intra_gb_per_s": float("nan")}]}, ["is nan", "finite"]),
        ({"nodes": [A | {"intra_gb_per_s": float("inf")}]}, ["is inf", "finite"]),
        ({"nodes": [A | {"intra_gb_per_s": "fast"}]}, ["is 'fast'", "number"]),
        ({"nodes": [A | {"intra_gb_per_s": True}]}, ["is True", "number"]),
        ({"nodes": [A | {"count": True}]}, ["count is True", "number"]),
        ({"nodes": [A | {"count": 0}]}, ["count is 0", "equal to 1"]),
        ({"nodes": [A | {"count": 10**15}]}, ["GPUs", "16384"]),
        ({"nodes": [{"name": "a", "gpus": {"L4": 10**9}}]}, ["L4 has count", "16384"]),
        ({"nodes": [A | {"count": 16385}]}, ["16385 GPUs", "16384"]),
        ({"nodes": [A | {"bandwidth": 3}]}, ["nodes.0.bandwidth is no field here"]),
        ({"nodes": [A], "gpus": {"x": {"memory_gb": 1}}}, ["gpus.x.dense_tflops is missing"]),
        ({"nodes": [A], "gpus": {"x": CARD | {"memory_gb": "big"}}}, ["gpus.x.memory_gb", "'big'"]),
    ],
)
def test_every_mistake_names_file_field_and_what_fits(
    content: dict[str, Any], needles: list[str]
) -> None:
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        Cluster.from_mapping(content, "c.yaml")

    assert str(caught.value).startswith("c.yaml: ")
    assert "\n" not in str(caught.value)
    for needle in needles:
        assert needle in str(caught.value)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("nodes: [", "is no valid .yaml"),
        ("\x00", "is no valid .yaml"),
        ("[" * 500, "is no valid .yaml"),
        ("", "holds nothing"),
        ("- a", "holds list"),
        ("nodes: []\nnodes: []", "key nodes stands twice in the mapping from line 1 on"),
        ("nodes: [{name: a, gpus: {L4: 1, L4: 2}}]", "key L4 stands twice"),
        ("? [1]\n: 2", "unhashable key"),
        ("1: 2\nnodes: [{name: a, gpus: [L4]}]", "a field's name must be text"),
    ],
)
def test_files_that_are_no_mapping_are_named(tmp_path: Path, text: str, needle: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text, encoding="utf-8")
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        Cluster.load(file)

    assert str(caught.value).startswith(f"{file}: ")
    assert needle in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.process_time() - start < 1


def test_missing_files_and_other_encodings_are_named(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("nodes: [{name: Zürich}]".encode("latin-1"))

    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        Cluster.load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"latin\.yaml: is no text in UTF-8"):
        Cluster.load(latin)


def test_the_largest_cluster_loads_in_a_second() -> None:
    start = time.process_time()
    cluster = cluster_of({"name": "a", "count": 2048, "gpus": {"L4": 8}}, inter_gb_per_s=1)

    assert cluster.world_size == 16_384
    assert time.process_time() - start < 1
