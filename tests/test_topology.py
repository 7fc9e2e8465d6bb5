"""`nvidia-smi topo -m` text becomes a node of a cluster file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from hexiseq_triton.cli import app
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner.clusters import Cluster
from hexiseq_triton.planner.topology import SYS_SHARE, listed_gpus, node_entry, read_topology


def matrix(rows: dict[str, str], tail: str = "\t0-47\t0\t\tN/A", separator: str = "\t") -> str:
    """Return the program's text: a header in underlined letters, rows, a legend."""
    header = separator.join(["", *rows, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    lines = [f"\x1b[4m{header}\x1b[0m"]
    for name, cells in rows.items():
        padded = (f" {cell} " if cell == "X" else cell for cell in cells.split())
        lines.append(separator.join([name, *padded]) + (tail if name.startswith("GPU") else ""))
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", "  SYS  = Connection", ""])


def dgx_h100() -> str:
    """Eight GPUs on a switch, a NIC beside each, and two more NICs for storage far from all."""
    rows = {}
    for i in range(8):
        near = ["PXB" if i == j else "NODE" if i // 4 == j // 4 else "SYS" for j in range(8)]
        storage = ["NODE", "SYS"] if i < 4 else ["SYS", "NODE"]
        rows[f"GPU{i}"] = " ".join(["NV18"] * i + ["X"] + ["NV18"] * (7 - i) + near + storage)
    gpu_cells = {name: cells.split() for name, cells in rows.items()}
    for n in range(10):
        to_gpus = [gpu_cells[f"GPU{i}"][8 + n] for i in range(8)]
        side = n // 4 if n < 8 else n - 8
        other = [m // 4 if m < 8 else m - 8 for m in range(10)]
        to_nics = ["X" if m == n else "NODE" if other[m] == side else "SYS" for m in range(10)]
        rows[f"NIC{n}"] = " ".join(to_gpus + to_nics)
    return matrix(rows)


QUAD_A100 = matrix(
    {
        "GPU0": "X NV4 NV4 NV4 SYS",
        "GPU1": "NV4 X NV4 NV4 SYS",
        "GPU2": "NV4 NV4 X NV4 PHB",
        "GPU3": "NV4 NV4 NV4 X PHB",
        "mlx5_0": "SYS SYS PHB PHB X",
    }
)
L40S_TWO_SOCKETS = matrix(
    {
        "GPU0": "X PIX SYS SYS NODE SYS",
        "GPU1": "PIX X SYS SYS NODE SYS",
        "GPU2": "SYS SYS X PXB SYS PHB",
        "GPU3": "SYS SYS PXB X SYS PHB",
        "NIC0": "NODE NODE SYS SYS X SYS",
        "NIC1": "SYS SYS PHB PHB SYS X",
    },
    separator="   ",
)
BRIDGED_PAIRS = matrix(
    {
        "GPU0": "X NV4 PHB PHB",
        "GPU1": "NV4 X PHB PHB",
        "GPU2": "PHB PHB X NV4",
        "GPU3": "PHB PHB NV4 X",
    },
    tail="\t0-31\tN/A",
)
CUBE_MESH_V100 = matrix(
    {
        "GPU0": "X NV1 NV2 SOC",
        "GPU1": "NV1 X SOC NV2",
        "GPU2": "NV2 SOC X NV1",
        "GPU3": "SOC NV2 NV1 X",
    }
)


@pytest.mark.parametrize(
    ("text", "model", "intra", "nics_per_gpu"),
    [
        (dgx_h100(), "H100-SXM", None, 1),
        (QUAD_A100, "A100-SXM-80GB", None, 0.25),
        (L40S_TWO_SOCKETS, "L40S", 32 * SYS_SHARE, 0.5),
        (BRIDGED_PAIRS, "RTX-A6000", 32, None),
        (CUBE_MESH_V100, "V100-SXM-32GB", 16 * SYS_SHARE, None),
        (matrix({"GPU0": "X PIX PIX", "NIC0": "PIX X PIX", "NIC1": "PIX PIX X"}), "L4", None, 2),
    ],
    ids=["switch", "full mesh", "two sockets", "bridged pairs", "cube mesh", "one GPU"],
)
def test_the_worst_pair_and_the_nearest_nics_decide(
    text: str, model: str, intra: float | None, nics_per_gpu: float | None
) -> None:
    topology = read_topology(text, "topo.txt")
    count = len(topology.gpus)
    entry, notes = node_entry(topology, [model] * count, nic_gb_per_s=50)

    assert entry["gpus"] == {model: count}
    assert entry.get("intra_gb_per_s") == intra
    assert entry.get("inter_gb_per_s") == (nics_per_gpu and 50 * nics_per_gpu)
    assert len(notes) == 2
    assert Cluster.from_mapping({"nodes": [{"name": "a"} | entry]}).world_size == count


def test_bridges_that_are_not_counted_are_named() -> None:
    _, notes = node_entry(read_topology(BRIDGED_PAIRS, "topo.txt"), ["RTX-A6000"] * 4)

    assert "worst path PHB" in notes[0]
    assert "NVLink of 2 of 6 pairs is not counted" in notes[0]


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("", "no line that begins with GPU0"),
        ("NVIDIA-SMI has failed", "no line that begins with GPU0"),
        (QUAD_A100.replace("GPU3\tNV4", "GPU9\tNV4"), "row GPU3 has 0 paths to 5 devices"),
        (QUAD_A100.replace("PHB\t0-47", "0-47"), "GPU2 to mlx5_0 is '0-47'"),
        (QUAD_A100.replace("NV4\tSYS\t0-47", "NV4\tNV4\t0-47", 1), "GPU0 to mlx5_0 is 'NV4'"),
        (QUAD_A100.replace("GPU1\tNV4", "GPU1\tC2C"), "GPU1 to GPU0 is 'C2C'"),
        (QUAD_A100.replace("GPU1\tNV4", "GPU1\tNV8"), "GPU0 to GPU1 is NV4, and GPU1 to GPU0"),
    ],
)
def test_text_that_is_no_matrix_is_refused(text: str, needle: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_topology(text, "topo.txt")

    assert str(caught.value).startswith("topo.txt: ")
    assert needle in str(caught.value)


def test_models_come_from_the_listing() -> None:
    text = (
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-6f0a)\n"
        "  MIG 1g.10gb     Device  0: (UUID: MIG-1c2d)\n"
        "GPU 1: NVIDIA L40S\n"
    )

    assert listed_gpus(text, "gpus.txt") == ["H100-SXM", "L40S"]
    with pytest.raises(ConfigError, match=r"GPU 1 is 'NVIDIA L40SX'.*--gpu"):
        listed_gpus(text.replace("L40S", "L40SX"), "gpus.txt")
    with pytest.raises(ConfigError, match=r"gpus\.txt: lists no GPU"):
        listed_gpus("No devices were found", "gpus.txt")


def import_topo(folder: Path, text: str, *arguments: str) -> Result:
    path = folder / "topo.txt"
    path.write_text(text, encoding="utf-8")
    return CliRunner().invoke(app, ["import", "topo", str(path), *arguments])


def test_the_command_prints_a_cluster_file_that_loads(tmp_path: Path) -> None:
    listing = tmp_path / "gpus.txt"
    listing.write_text("GPU 0: NVIDIA L40S\nGPU 1: NVIDIA L4\n", encoding="utf-8")
    arguments = ("--list", str(listing), "--count", "2", "--name", "n", "--nic-gb-per-s", "12.5")
    text = matrix({"GPU0": "X PXB PIX", "GPU1": "PXB X PIX", "NIC0": "PIX PIX X"})
    result = import_topo(tmp_path, text, *arguments)

    assert result.exit_code == 0, result.stderr
    cluster = Cluster.from_mapping(yaml.safe_load(result.stdout))
    assert [(d.node, d.gpu, d.in_node_gb_per_s, d.across_gb_per_s) for d in cluster.devices] == [
        ("n-0", "L40S", 32, 6.25),
        ("n-0", "L4", 32, 6.25),
        ("n-1", "L40S", 32, 6.25),
        ("n-1", "L4", 32, 6.25),
    ]


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        ([], "either --gpu NAME, or --list FILE"),
        (["--gpu", "A100"], "'A100' is no known GPU; near it: A100"),
        (["--gpu", "L4", "--nic-gb-per-s", "-5"], "--nic-gb-per-s is -5; it is above 0"),
    ],
)
def test_the_command_says_what_is_missing(
    tmp_path: Path, arguments: list[str], needle: str
) -> None:
    result = import_topo(tmp_path, QUAD_A100, *arguments)

    assert result.exit_code == 2
    assert needle in result.stderr
