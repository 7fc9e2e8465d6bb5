"""The GPU table, files laid over it, and the command that lists it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hexiseq_triton.cli import app
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.gpus import GpuSpec, gpu_by_device_name, gpu_overlay, gpu_table

CARD = {"dense_tflops": 200, "memory_gb": 24, "network_gb_per_s": 12.5}


def gpu_file(folder: Path, gpus: Any, **fields: Any) -> Path:
    path = folder / "my_gpus.yaml"
    path.write_text(yaml.safe_dump({"gpus": gpus, **fields}), encoding="utf-8")
    return path


def test_table_holds_dense_peaks() -> None:
    peaks = {name: gpu.dense_tflops.value for name, gpu in gpu_table().items()}

    # sparse peaks are twice the dense ones, so one sparse entry breaks a ratio
    assert 3.0 < peaks["H100-SXM"] / peaks["A100-SXM-80GB"] < 3.4
    assert peaks["H200-SXM"] == peaks["H100-SXM"] > peaks["H100-PCIe"]
    assert 1.0 < peaks["L40S"] / peaks["A100-SXM-80GB"] < 1.3
    assert 0.9 < peaks["A10"] / peaks["L4"] < 1.1
    assert 2.0 < peaks["B200"] / peaks["H100-SXM"] < 2.6
    assert peaks["A800-SXM-80GB"] == peaks["A100-PCIe-40GB"] == 312


def test_every_number_of_the_table_has_an_origin_and_a_source() -> None:
    for name, gpu in gpu_table().items():
        figures = dict(gpu.figures())
        assert {"dense_tflops", "memory_gb", "memory_gb_per_s", "pcie_gb_per_s"} < set(figures)
        for figure in figures.values():
            assert figure.origin in ("measured", "spec", "assumed"), name
            assert " " in figure.source, (name, figure)  # words, not a key of `sources`
            assert figure.source != "the user's file"


def test_links_and_memory_of_the_table_are_one_way_and_plausible() -> None:
    table = gpu_table()
    nvlink = {name: gpu.nvlink_gb_per_s.value for name, gpu in table.items() if gpu.nvlink_gb_per_s}

    # both directions together are what vendors print: 900 for H100, 600 for A100
    assert nvlink["H100-SXM"] / nvlink["A100-SXM-80GB"] == 1.5
    assert nvlink["A800-SXM-80GB"] / nvlink["A100-SXM-80GB"] == pytest.approx(2 / 3)
    assert nvlink["B200"] / nvlink["H100-SXM"] == 2
    for name, gpu in table.items():
        assert gpu.pcie_gb_per_s is not None
        assert 13 <= gpu.pcie_gb_per_s.value <= 64, name
        assert gpu.pcie_gb_per_s.value < nvlink.get(name, 1000), name
        # FLOPs for each byte: a wrong unit or a sparse peak lies outside
        assert 30 < 1e3 * gpu.dense_tflops.value / gpu.memory_gb_per_s.value < 450, name


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


def test_three_numbers_suffice_and_the_rest_is_assumed(tmp_path: Path) -> None:
    gpus = gpu_overlay(gpu_file(tmp_path, {"mine": CARD}))

    assert list(gpus) == ["mine"]
    assert gpus["mine"].dense_tflops.source == "the user's file"
    assert gpus["mine"].assumed == {
        "memory_gb_per_s": 1000,
        "efficiency.gemm": 0.7,
        "efficiency.attention_forward": 0.5,
        "efficiency.attention_backward": 0.4,
        "efficiency.memory": 0.8,
    }


def test_what_a_file_says_of_a_known_gpu_keeps_the_rest(tmp_path: Path) -> None:
    given = {"value": 0.66, "origin": "measured", "source": "us"}
    file = gpu_file(
        tmp_path,
        {"H100-SXM": {"memory_gb": 94, "efficiency": {"attention_forward": given}}},
        sources={"us": "our own bench"},
    )
    card, known = gpu_overlay(file)["H100-SXM"], gpu_table()["H100-SXM"]

    assert (card.memory_gb.value, card.dense_tflops) == (94, known.dense_tflops)
    assert card.efficiency.attention_forward.source == "our own bench"
    assert card.efficiency.attention_backward == known.efficiency.attention_backward
    assert card.device_names == known.device_names


def test_measured_rates_replace_assumed_efficiencies() -> None:
    rates = [{"work": "gemm_forward", "tflops": 100}, {"work": "attention_forward", "tflops": 90}]
    file = {"nodes": [{"name": "a", "gpus": ["mine"]}], "gpus": {"mine": CARD | {"rates": rates}}}
    assumed = Cluster.from_mapping(file).assumed("mine")

    assert "efficiency.attention_forward" not in assumed
    assert "efficiency.gemm" in assumed  # of backward
    rates.append({"work": "gemm_backward", "tflops": 100})
    assert "efficiency.gemm" not in Cluster.from_mapping(file).assumed("mine")


def test_a_cluster_file_can_name_the_gpus_of_a_gpu_file(tmp_path: Path) -> None:
    gpus = gpu_file(tmp_path, {"mine": CARD})
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("nodes: [{name: a, gpus: {mine: 2}}]", encoding="utf-8")

    with pytest.raises(ConfigError, match="'mine', which is no known GPU"):
        Cluster.load(cluster)
    loaded = Cluster.load(cluster, gpus)
    assert loaded.gpu(1).dense_tflops.value == 200
    assert loaded.assumed("mine")["intra_gb_per_s"] == 12.5


def test_a_gpu_described_twice_is_refused(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    content = {"nodes": [{"name": "a", "gpus": ["mine"]}], "gpus": {"mine": CARD}}
    cluster.write_text(yaml.safe_dump(content), encoding="utf-8")

    with pytest.raises(ConfigError, match="gpus describes mine, and so does the GPU file"):
        Cluster.load(cluster, gpu_file(tmp_path, {"mine": CARD}))


@pytest.mark.parametrize(
    ("gpus", "needle"),
    [
        ([], "gpus: a mapping of names is needed"),
        ({"x": 5}, "gpus.x is 5: a mapping of fields"),
        ({"x": {"memory_gb": 2}}, "gpus.x.dense_tflops is missing"),
        ({"x": CARD | {"tflops": 2}}, "gpus.x.tflops is no field here"),
        ({"x": CARD | {"dense_tflops": -1}}, "gpus.x.dense_tflops.value is -1"),
        ({"x": CARD | {"memory_gb": float("nan")}}, "is nan"),
        ({"x": CARD | {"memory_gb": True}}, "gpus.x.memory_gb.value is True: a number"),
        ({"x": CARD | {"dense": False}}, "gpus.x.dense is False"),
        ({"x": CARD | {"runnable": False}}, "runnable: false needs a reason"),
        ({"L4": {"efficiency": {"gem": 0.5}}}, "gpus.L4.efficiency.gem is no field here"),
        ({"L4": {"efficiency": {"gemm": 70}}}, "gpus.L4.efficiency: gemm is 70; it is a share of"),
    ],
)
def test_every_mistake_in_a_gpu_file_is_named(tmp_path: Path, gpus: Any, needle: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gpu_overlay(gpu_file(tmp_path, gpus))

    assert "my_gpus.yaml: " in str(caught.value)
    assert needle in str(caught.value)


def listed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["gpus", *arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_the_list_shows_every_gpu_what_is_assumed_and_what_cannot_run(tmp_path: Path) -> None:
    text = listed("--gpus", str(gpu_file(tmp_path, {"mine": CARD})))

    assert all(name in text for name in (*gpu_table(), "mine"))
    assert "1000?" in text
    assert "V100-SXM-32GB cannot run: it has no bf16" in " ".join(text.split())


def test_one_gpu_shows_origins_and_sources_and_json_holds_the_same() -> None:
    text = " ".join(listed("L40S").split())
    for word in ("362", "spec", "verl", "efficiency.gemm", "assumed"):
        assert word in text

    printed = json.loads(listed("L40S", "--json"))
    assert GpuSpec(**printed["L40S"]) == gpu_table()["L40S"]


def test_an_unknown_gpu_is_told_those_near_it() -> None:
    result = CliRunner().invoke(app, ["gpus", "A100"])

    assert result.exit_code == 2
    assert "near it: A100-SXM-80GB, A100-SXM-40GB" in result.stderr
