"""The package's layers: what resolves to what, and who imports whom."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import hexiseq_triton
import hexiseq_triton.kernels
import hexiseq_triton.planner

ROOT = Path(__file__).resolve().parent.parent
PLANNER = Path(hexiseq_triton.planner.__file__).parent
KERNELS = Path(hexiseq_triton.kernels.__file__).parent


@pytest.mark.parametrize("name", ["kernels", "planner"])
def test_a_plain_name_never_resolves_to_this_repository(name: str) -> None:
    found = importlib.util.find_spec(name)
    assert found is None or not Path(str(found.origin)).is_relative_to(ROOT)


def imports(folder: Path) -> set[str]:
    """Return the modules that the files of a folder import, at any depth of their code."""
    names = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_the_planner_imports_no_torch_and_the_kernels_no_exchange_and_no_planner() -> None:
    assert len(imports(PLANNER)) > 10
    assert not {n for n in imports(PLANNER) if n.split(".")[0] in ("torch", "triton")}
    forbidden = ("torch.distributed", "hexiseq_triton.planner")
    assert not {n for n in imports(KERNELS) if n.startswith(forbidden)}
    runtime = {n for n in imports(PLANNER) | imports(KERNELS) if n.startswith("hexiseq_triton")}
    leaves = ("kernels", "planner", "errors", "segments")
    assert {n.split(".")[1] for n in runtime if "." in n} <= set(leaves)


@pytest.mark.parametrize(
    "code", ["import hexiseq_triton.planner", "import hexiseq_triton as hx; hx.plan"]
)
def test_planning_loads_no_torch(code: str) -> None:
    check = f"{code}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, cwd="/").returncode == 0


def test_attention_loads_neither_triton_nor_the_compiler() -> None:
    """Either takes seconds, and Triton reads its environment when it is loaded."""
    check = (
        "import hexiseq_triton.attention, hexiseq_triton.flash, sys; "
        "sys.exit(bool({'triton', 'torch._dynamo'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False, cwd="/").returncode == 0


def test_public_names_are_sorted_complete_and_there() -> None:
    assert hexiseq_triton.__all__ == sorted(hexiseq_triton.__all__)
    for module in (hexiseq_triton, hexiseq_triton.kernels, hexiseq_triton.planner):
        assert all(getattr(module, name) is not None for name in module.__all__)
    assert set(hexiseq_triton.__all__) <= set(dir(hexiseq_triton))
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        hexiseq_triton.absent  # noqa: B018
