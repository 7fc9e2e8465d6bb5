"""What if: changes to a cluster, every combination of them, and what each comes to."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from hexiseq_triton.cli import app
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner import Cluster, ModelSpec, Workload, plan
from hexiseq_triton.planner.simulator import simulate_plan
from hexiseq_triton.planner.variants import (
    AS_IT_IS,
    Variant,
    gpu_named,
    num_combinations,
    variants_of,
)
from hexiseq_triton.planner.whatif import Outcome, frontier, judged, prices_of, unpriced
from hexiseq_triton.reports.whatif_report import outcome_lines, outcomes_table

CLUSTER = {
    "inter_gb_per_s": 10,
    "nodes": [
        {"name": "old", "count": 2, "gpus": {"L40S": 2}},
        {"name": "new", "gpus": {"H100-SXM": 2}},
    ],
    "prices": {"L40S": 1.0},
}
MODEL = ModelSpec(layers=2, hidden=1024, heads=8, kv_heads=8, ffn=2048, vocab=1000)
WORKLOAD = Workload(65536, 4)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whatif") / "cluster.yaml"
    path.write_text(yaml.safe_dump(CLUSTER))
    return path


def names(variants: list[Variant]) -> list[str]:
    return [each.name for each in variants]


def test_every_combination_is_a_variant(file: Path) -> None:
    found = variants_of(file, add=["2xH100"], drop=["old-1"], bandwidth=["x2", "40"])

    assert len(found) == len(set(names(found))) == 2 * 2 * 3
    assert names(found)[:2] == [AS_IT_IS, "bandwidth x2"]
    by_name = {each.name: each for each in found}
    changed = by_name["+ 2xH100, without old-1, bandwidth x2"]
    assert changed.gpus == {"L40S": 2, "H100-SXM": 4}
    assert {device.node for device in changed.cluster.devices} == {"old-0", "new", "new0"}
    assert [device.rank for device in changed.cluster.devices] == list(range(6))
    assert {device.across_gb_per_s for device in changed.cluster.devices} == {20.0}
    as_given = by_name["bandwidth 40"].cluster.devices
    assert {device.across_gb_per_s for device in as_given} == {40.0}
    assert found[0].cluster == Cluster.load(file)


def test_changes_of_one_kind_go_together_by_a_plus(file: Path) -> None:
    (_, changed) = variants_of(file, add=["2x4xL40S+1xA100-SXM-80GB"])[:2]
    assert changed.gpus == {"L40S": 12, "H100-SXM": 2, "A100-SXM-80GB": 1}
    assert len(changed.cluster.ranks_by_node) == 6
    (_, left) = variants_of(file, drop=["old-0+new"])
    assert left.gpus == {"L40S": 2}
    (_, left) = variants_of(file, drop=["old"])  # both nodes that the file describes together
    assert left.gpus == {"H100-SXM": 2}


def test_what_leaves_nothing_is_no_variant(file: Path) -> None:
    found = variants_of(file, add=["8xH200"], drop=["old+new"], bandwidth=["x2"])
    assert names(found) == [
        AS_IT_IS,
        "bandwidth x2",
        "+ 8xH200",
        "+ 8xH200, bandwidth x2",
        "+ 8xH200, without old+new",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": ["node3"]}, "has no node 'node3'; near it: new"),
        ({"drop": ["old+new"]}, r"--drop old\+new: no node of .* would be left"),
        ({"add": ["8xH101"]}, "--add 8xH101: 'H101' is no known GPU; near it: .*H100-SXM"),
        ({"add": ["8xA100"]}, "A100 may be A100-SXM-80GB or A100-SXM-40GB or .*whole name"),
        ({"add": ["H100"]}, "'H100' is no node; write 8xH100"),
        ({"add": ["0xH100"]}, "'0xH100' is no node"),
        ({"add": ["99999999999xH100"]}, "is 99999999999 GPUs; at most 16384 can be planned"),
        ({"bandwidth": ["fast"]}, "--bandwidth is 'fast'; write x2"),
        ({"bandwidth": ["x0"]}, "--bandwidth is 'x0'"),
        ({"add": ["1xH100", "1xH100"]}, "--add 1xH100 stands twice; give it once"),
        ({"bandwidth": ["x2", "4", "x2"]}, "--bandwidth x2 stands twice; give it once"),
        ({"add": ["1xL40S"] * 7, "bandwidth": ["x2"] * 8}, "72 combinations; at most 64"),
    ],
)
def test_changes_that_cannot_be_made_are_refused(
    file: Path, changes: dict[str, list[str]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        variants_of(file, **changes)


def test_one_node_has_no_network_to_change(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(yaml.safe_dump({"nodes": [{"name": "a", "gpus": {"H100-SXM": 2}}]}))
    with pytest.raises(ConfigError, match=r"--bandwidth x2: .* has one node"):
        variants_of(path, bandwidth=["x2"])
    with pytest.raises(ConfigError, match="inter_gb_per_s is missing"):
        variants_of(path, add=["2xH100"])


def test_new_nodes_join_at_the_slowest_nodes_network_if_the_file_has_no_common_one(
    tmp_path: Path,
) -> None:
    nodes = [{"name": n, "gpus": {"L4": 1}, "inter_gb_per_s": r} for n, r in (("a", 7), ("b", 5))]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"nodes": nodes}))
    (_, changed) = variants_of(tmp_path / "c.yaml", add=["1xL4"])
    assert [device.across_gb_per_s for device in changed.cluster.devices] == [7, 5, 5]


def test_a_gpu_of_the_cluster_goes_before_others_of_the_table() -> None:
    table = dict.fromkeys(("A100-SXM", "A100-PCIe", "B200"))
    assert gpu_named("A100", ["A100-PCIe"], table, "") == "A100-PCIe"  # type: ignore[arg-type]
    assert gpu_named("B200", [], table, "") == "B200"  # type: ignore[arg-type]


def test_prices_are_the_files_and_over_them_the_users(file: Path) -> None:
    found = variants_of(file, add=["1xL4"])
    assert prices_of(found, []) == {"L40S": 1.0}
    prices = prices_of(found, ["H100=2.5", "L40S=0.5"])
    assert prices == {"L40S": 0.5, "H100-SXM": 2.5}
    assert unpriced(found, prices) == ["L4"]
    for wrong in ("H100", "H100=", "H100=-1", "H100=inf"):
        with pytest.raises(ConfigError, match="it is GPU=PRICE an hour"):
            prices_of(found, [wrong])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["H100=2", "H100-SXM=3"], "--price H100-SXM=3: H100-SXM stands twice; give it once"),
        (["H200=2"], "--price H200=2: no variant has a H200-SXM; there are H100-SXM, L40S"),
    ],
)
def test_prices_that_would_count_for_nothing_are_refused(
    file: Path, given: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prices_of(variants_of(file), given)


def test_a_file_with_a_price_of_no_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="prices names 'L40', which is no known GPU"):
        Cluster.from_mapping(CLUSTER | {"prices": {"L40": 1.0}})


def test_the_frontier_holds_what_nothing_beats() -> None:
    variant = variants_of_nothing()
    costs = [(4.0, 100.0), (2.0, 50.0), (3.0, 40.0), (2.0, 60.0), (9.0, 100.0), (1.0, 5.0)]
    outcomes = [
        Outcome(variant, price * rate * 3600 / 1e6, 1, tokens_per_s=rate) for price, rate in costs
    ]
    outcomes += [Outcome(variant, None, 1, tokens_per_s=1e9), Outcome(variant, 1.0, 1)]

    best = frontier(outcomes)

    assert [round(each.cost_per_million_tokens or 0) for each in best] == [1, 2, 4]
    assert [each.tokens_per_s for each in best] == [5.0, 60.0, 100.0]


def variants_of_nothing() -> Variant:
    return Variant("", Cluster((), {}))


@pytest.fixture(scope="module")
def outcomes(file: Path) -> list[Outcome]:
    variants = variants_of(file, add=["2xH100"], drop=["new"])
    return judged(variants, MODEL, WORKLOAD, {"L40S": 1.0, "H100-SXM": 3.0})


def test_a_variant_costs_its_gpus_for_as_long_as_the_fastest_simulated_step(
    file: Path, outcomes: list[Outcome]
) -> None:
    cluster = Cluster.load(file)
    planned = plan(cluster, MODEL, seq_len=65536, global_batch=4)
    simulation = simulate_plan(planned, cluster, MODEL, engine="event")

    base = outcomes[0]
    assert (base.tokens_per_s or 0) >= simulation.tokens_per_s
    assert base.price_per_hour == 4 * 1.0 + 2 * 3.0
    hours = 1e6 / (base.tokens_per_s or 1) / 3600
    assert base.cost_per_million_tokens == pytest.approx(10 * hours)


def test_more_gpus_hold_longer_sequences_and_are_faster(outcomes: list[Outcome]) -> None:
    by_name = {each.variant.name: each for each in outcomes}
    more, base, fewer = (by_name[name] for name in ("+ 2xH100", AS_IT_IS, "without new"))
    assert more.longest_seq_len > base.longest_seq_len > fewer.longest_seq_len > 0
    assert (more.tokens_per_s or 0) > (base.tokens_per_s or 0) > (fewer.tokens_per_s or 0)


def test_a_sequence_that_does_not_fit_is_said_and_has_no_cost(file: Path) -> None:
    (_, few) = variants_of(file, drop=["old-0+new"])
    large = ModelSpec(layers=48, hidden=4096, heads=32, kv_heads=32, ffn=16384, vocab=1000)
    (outcome,) = judged([few], large, Workload(2**20, 1), {"L40S": 1.0})
    assert outcome.tokens_per_s is outcome.cost_per_million_tokens is None
    assert "out of memory: rank" in outcome.reason


def test_the_table_compares_with_the_cluster_as_it_is(outcomes: list[Outcome]) -> None:
    console = Console(width=200, file=io.StringIO())
    console.print(outcomes_table(outcomes))
    for line in outcome_lines(outcomes, "direct", ["L4"]):
        console.print(line, markup=False)
    printed = console.file.getvalue()  # type: ignore[attr-defined]

    for each in outcomes:
        assert each.variant.name in printed
        assert f"{each.tokens_per_s:,.0f}" in printed
        assert f"{each.cost_per_million_tokens:.4g}" in printed
    assert "mode direct, engine event" in printed
    assert "no price for L4: give --price L4=... an hour" in printed


def test_the_command_says_how_many_combinations_are_no_variants(
    outcomes: list[Outcome],
) -> None:
    assert not [line for line in outcome_lines(outcomes, "direct", []) if "left out" in line]
    (one,) = (line for line in outcome_lines(outcomes, "direct", [], 1) if "left out" in line)
    assert one.startswith("1 combination is left out: no GPU remains, or one node only")
    assert num_combinations(["2xH100"], [], ["x2", "40"]) == 2 * 1 * 3


def test_the_command_shows_how_far_it_is_where_errors_go(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any stream for a terminal
    words = ["--cluster", str(file), "--model", "tiny", "--seq-len", "1024", "--global-batch", "1"]
    code, printed, error = run(*words, "--json")
    assert code == 0
    assert json.loads(printed)["variants"]
    assert AS_IT_IS in error


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["whatif", *words])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_draws_and_dumps(file: Path, tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(vars(MODEL)))
    words = ["--cluster", str(file), "--model", str(tmp_path / "model.yaml"), "--seq-len", "8192"]
    words += ["--global-batch", "2", "--drop", "old-1"]

    code, _, error = run(*words, "--plot", str(tmp_path / "none.png"))
    assert code == 2
    assert "no variant has a cost: no price for H100-SXM" in error

    drawn = tmp_path / "frontier.png"
    code, printed, _ = run(*words, "--price", "H100=2.5", "--plot", str(drawn), "--json")
    assert code == 0
    assert drawn.read_bytes().startswith(b"\x89PNG")
    found = json.loads(printed)
    assert (found["mode"], found["engine"]) == ("direct", "event")
    assert [each["name"] for each in found["variants"]] == [AS_IT_IS, "without old-1"]
    assert found["variants"][0]["price_per_hour"] == 4 * 1.0 + 2 * 2.5
    assert any(each["on_frontier"] for each in found["variants"])

    code, _, error = run(*words, "--global-batch", "0")
    assert code == 2
    assert "hexiseq: global_batch is 0" in error

    code, _, error = run(*words, "--add", "8xH999")
    assert code == 2
    assert "hexiseq: --add 8xH999: 'H999' is no known GPU" in error
