"""The user's launch tables: which file, which section, what a wrong one says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kernel_runs  # noqa: F401  (chooses Triton's interpreter before Triton is imported)
import pytest
import torch
import yaml

from hexiseq_triton.errors import ConfigError
from hexiseq_triton.kernels import launch_tables, user_tables
from hexiseq_triton.kernels.configs import Config
from hexiseq_triton.kernels.launch_tables import FORWARD, GRAD_Q, config_for
from hexiseq_triton.kernels.user_tables import Card, Entry, Section, load_sections, save_section

CARD = Card("Some Card", "sm_89", 101376, "3.6.0")
HOPPER = Card("Other Card", "sm_90", 232448, "3.6.0")
ENTRY = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2, "milliseconds": 1.5}
SECTION: dict[str, Any] = {
    "card": CARD.name,
    "arch": CARD.arch,
    "shared_memory_bytes": CARD.shared_memory_bytes,
    "triton": CARD.triton,
    "tables": {"forward": {128: ENTRY}},
}


def write(path: Path, *sections: dict[str, Any], version: int = 1) -> Path:
    path.write_text(yaml.safe_dump({"version": version, "sections": list(sections)}))
    return path


def properties(arch: str, shared: int, name: str = "Some Card") -> SimpleNamespace:
    major, minor = divmod(int(arch.removeprefix("sm_")), 10)
    return SimpleNamespace(
        name=name, major=major, minor=minor, shared_memory_per_block_optin=shared
    )


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Let the device be CARD, without a GPU, and return where its file would be."""
    monkeypatch.delenv(user_tables.PATH_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(user_tables.triton, "__version__", CARD.triton)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: properties(CARD.arch, 101376)
    )
    for remembered in (user_tables.tuned, launch_tables.architecture):
        remembered.cache_clear()
    path = tmp_path / "hexiseq_triton" / "launch_tables.yaml"
    path.parent.mkdir()
    yield path
    for remembered in (user_tables.tuned, launch_tables.architecture):
        remembered.cache_clear()


def queries(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return SimpleNamespace(shape=(1, 1, head_dim), dtype=dtype, device=torch.device("cuda", 0))


def test_without_a_file_the_built_in_entry_is_taken(on_card: Path) -> None:
    assert not on_card.exists()
    assert config_for(FORWARD, queries(128)) == FORWARD["sm_86", 128]


def test_the_users_choice_comes_first_and_only_where_there_is_one(on_card: Path) -> None:
    write(on_card, SECTION)
    assert config_for(FORWARD, queries(128)) == Config(64, 32, 4, 2)
    assert config_for(FORWARD, queries(96)) == Config(64, 32, 4, 2)  # padded to 128
    assert config_for(FORWARD, queries(64)) == FORWARD["sm_86", 64]
    assert config_for(GRAD_Q, queries(128)) == GRAD_Q["sm_86", 128]
    assert config_for(FORWARD, queries(128, torch.float32)) == launch_tables.FLOAT32


def test_one_program_alone_on_a_multiprocessor_takes_a_choice_of_its_own(on_card: Path) -> None:
    write(on_card, SECTION | {"tables": {"grad_q": {128: ENTRY, 64: ENTRY}}})
    assert config_for(GRAD_Q, queries(128), sm_margin=8) == GRAD_Q.alone["sm_86", 128]
    assert config_for(GRAD_Q, queries(64), sm_margin=8) == Config(64, 32, 4, 2)  # has none


def test_two_sections_of_one_card_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Some Card with Triton 3\.6\.0 has several sections"):
        load_sections(write(tmp_path / "t.yaml", SECTION, SECTION))


def test_a_variable_names_another_file(
    on_card: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(on_card, SECTION)
    path = write(tmp_path / "mine.yaml", SECTION | {"tables": {"forward": {64: ENTRY}}})
    monkeypatch.setenv(user_tables.PATH_VARIABLE, str(path))
    assert config_for(FORWARD, queries(64)) == Config(64, 32, 4, 2)
    assert config_for(FORWARD, queries(128)) == FORWARD["sm_86", 128]


def test_a_variable_may_name_a_file_that_is_yet_to_be_tuned(
    on_card: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(user_tables.PATH_VARIABLE, str(on_card))
    for _ in range(3):
        assert config_for(FORWARD, queries(128)) == FORWARD["sm_86", 128]
    (line,) = caplog.messages
    assert line.startswith(f"HEXISEQ_LAUNCH_TABLES names {on_card}, which does not exist: built-in")


@pytest.mark.parametrize(
    "other",
    [
        {"card": "Some Card 2"},
        {"triton": "3.5.0"},
        {"shared_memory_bytes": 102400},
        {"arch": "sm_86"},
    ],
    ids=str,
)
def test_sections_of_others_are_left_alone_with_one_line(
    on_card: Path, other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    write(on_card, SECTION | other)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert config_for(FORWARD, queries(128)) == FORWARD["sm_86", 128]
    (line,) = caplog.messages
    assert line == (
        f"{on_card} has nothing for Some Card (sm_89, 101376 bytes of shared memory) under Triton "
        "3.6.0: built-in launch tables are used; `hexiseq tune` measures this card"
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"block_m": 48}, r"forward.128.block_m is 48: Input should be 16, 32, 64, 128 or 256"),
    ({"num_stages": 0}, r"num_stages is 0: Input should be greater than or equal to 1"),
    ({"num_warp": 4}, r"forward.128.num_warp is no field here; remove it or correct its name"),
    ({"descriptors": True}, r"forward, head dimension 128: descriptors need sm_90; .* is sm_89"),
    ({"milliseconds": -1.0}, r"milliseconds is -1.0: Input should be greater than 0"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[str(change) for change, _ in WRONG])
def test_an_impossible_choice_is_named(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "t.yaml", SECTION | {"tables": {"forward": {128: ENTRY | change}}})
    with pytest.raises(ConfigError, match=message) as error:
        load_sections(path)
    assert str(error.value).startswith(f"{path}: sections.0")


def test_a_block_larger_than_the_cards_shared_memory_is_named(tmp_path: Path) -> None:
    tables = {"grad_q": {256: ENTRY | {"block_n": 256}}}
    with pytest.raises(ConfigError, match="a block takes 131072 bytes; Some Card has 101376 bytes"):
        load_sections(write(tmp_path / "t.yaml", SECTION | {"tables": tables}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 2\nsections: []\n", "version is 2: Input should be 1"),
        ("version: 1\n", "sections.*required"),
        ("version: [1\n", "cannot be read"),
        (
            "version: 1\nsections: []\nversion: 1\n",
            "cannot be read: 'version' stands twice; remove one.*line 3",
        ),
        ("", "the file"),
        ("version: 1\nsections: []\nextra: 1\n", "extra is no field here"),
    ],
    ids=["version", "missing", "no yaml", "twice", "empty", "unknown"],
)
def test_a_file_of_another_kind_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_sections(path)


def test_saving_keeps_other_cards_and_what_was_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "t.yaml"
    slow, fast = Entry(64, 32, 4, 2, milliseconds=2.0), Entry(128, 64, 8, 2, milliseconds=1.0)
    save_section(Section.of(CARD, {"forward": {64: slow, 128: slow}}), path)
    save_section(Section.of(HOPPER, {"grad_q": {64: Entry(64, 64, 4, 2, descriptors=True)}}), path)
    save_section(Section.of(CARD, {"forward": {128: fast}, "grad_kv": {64: slow}}), path)

    hopper, card = load_sections(path)
    assert hopper.measured_on == HOPPER
    tables = {"forward": {64: slow, 128: fast}, "grad_kv": {64: slow}}
    assert card == Section.of(CARD, tables)
    assert path.read_text().startswith("# Launch tables of hexiseq_triton")
    assert [each.name for each in path.parent.iterdir()] == ["t.yaml"]


def test_a_file_that_is_no_table_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.yaml"
    path.write_text("notes: mine\n")
    with pytest.raises(ConfigError, match="notes is no field here"):
        save_section(Section.of(CARD, {}), path)
    assert path.read_text() == "notes: mine\n"


@pytest.mark.parametrize(
    ("arch", "shared", "entries"),
    [
        ("sm_80", 166912, "sm_80"),
        ("sm_89", 101376, "sm_86"),
        ("sm_90", 232448, "sm_90"),
        ("sm_100", 232448, "sm_80"),
        ("sm_120", 101376, "sm_86"),
        ("sm_87", 166912, "sm_80"),
    ],
)
def test_unknown_cards_get_entries_by_their_shared_memory(
    on_card: Path, arch: str, shared: int, entries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties(arch, shared))
    assert config_for(FORWARD, queries(64)) == FORWARD[entries, 64]


def test_a_card_with_too_little_shared_memory_is_named(
    on_card: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties("sm_75", 65536))
    with pytest.raises(ValueError, match=r"Some Card has 65536 bytes.*the kernels need 101376"):
        config_for(FORWARD, queries(64))
