"""Documents as an endless stream of tokens, cut into sequences."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hexiseq_triton.corpus import Corpus, Pack, sequences_of, standard_library
from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner import Plan, Split

SIZES = {"a": 1, "b": 40, "c": 7, "d": 12, "e": 0, "f": 5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of a few bytes; each consists of its own letter."""
    for name, size in SIZES.items():
        (tmp_path / f"{name}.py").write_text(name * size, encoding="utf-8")
    (tmp_path / "notes.txt").write_text("no", encoding="utf-8")
    return tmp_path


def documents(pack: Pack) -> list[str]:
    """Return the text of each document of a pack."""
    bounds = pack.cu_seqlens.tolist()
    return [bytes(pack.tokens[a:b].tolist()).decode() for a, b in pairwise(bounds)]


def test_an_epoch_holds_every_document_once(folder: Path) -> None:
    corpus = Corpus(folder)

    text = documents(corpus.sequences(range(1), corpus.num_tokens))

    assert sorted(text) == sorted(name * size for name, size in SIZES.items() if size)


def test_each_epoch_has_an_order_of_its_own(folder: Path) -> None:
    corpus = Corpus(folder)

    epochs = [documents(corpus.sequences(range(i, i + 1), corpus.num_tokens)) for i in range(8)]

    assert len({tuple(epoch) for epoch in epochs}) > 1


@pytest.mark.parametrize("seq_len", [1, 7, 13, 64, 65, 200])
def test_sequences_are_consecutive_runs_of_the_stream(folder: Path, seq_len: int) -> None:
    corpus = Corpus(folder)

    together = corpus.sequences(range(5), seq_len)

    whole = corpus.sequences(range(1), 5 * seq_len)
    assert torch.equal(together.tokens, whole.tokens)
    apart = [corpus.sequences(range(i, i + 1), seq_len) for i in range(5)]
    assert documents(together) == [text for pack in apart for text in documents(pack)]
    assert all(pack.cu_seqlens[-1] == len(pack.tokens) == seq_len for pack in apart)


@pytest.mark.parametrize("origin", [30, -26])
def test_sequences_go_on_anywhere_in_the_stream(folder: Path, origin: int) -> None:
    corpus = Corpus(folder)

    found = corpus.sequences(range(2, 4), 13, origin)

    whole = corpus.sequences(range(1), 200).tokens
    assert torch.equal(found.tokens, whole[origin + 26 : origin + 52])


def test_a_document_that_got_shorter_is_named(folder: Path) -> None:
    corpus = Corpus(folder, pattern="b.py")
    (folder / "b.py").write_text("b" * 7, encoding="utf-8")

    with pytest.raises(ConfigError, match=r"b\.py had 40 bytes when the run began"):
        corpus.sequences(range(1), 40)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"folder is .*nowhere; there is no such folder"):
        Corpus(tmp_path / "nowhere")


def test_a_file_in_the_place_of_its_folder_is_told_how_to_name_it(folder: Path) -> None:
    says = rf"folder is {folder / 'b.py'}; this is a file: folder: {folder}, pattern: b.py reads it"
    with pytest.raises(ConfigError, match=says):
        Corpus(folder / "b.py")


def test_a_document_longer_than_a_sequence_is_cut_at_its_ends(folder: Path) -> None:
    corpus = Corpus(folder, pattern="b.py")

    pack = corpus.sequences(range(3), 15)

    assert documents(pack) == ["b" * 15, "b" * 15, "b" * 10, "b" * 5]


def test_the_seed_decides_and_nothing_else(folder: Path) -> None:
    def stream(seed: int) -> list[str]:
        return documents(Corpus(folder, seed=seed).sequences(range(3, 9), 31))

    assert stream(1) == stream(1)
    assert len({tuple(stream(seed)) for seed in range(5)}) > 1


def test_larger_files_are_left_out(folder: Path) -> None:
    corpus = Corpus(folder, max_document_tokens=7)

    assert [d.num_tokens for d in corpus.documents] == [1, 7, 5]


def test_a_folder_without_files_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no file \*\.rs"):
        Corpus(folder, pattern="*.rs")


def test_documents_of_one_token_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"every file \*\.py of .* is one byte"):
        Corpus(folder, max_document_tokens=1)


def test_the_standard_library_is_there_and_long_tailed() -> None:
    corpus = Corpus()

    sizes = sorted(document.num_tokens for document in corpus.documents)
    assert corpus.num_tokens > 1_000_000
    assert sizes[-1] > 10 * sizes[len(sizes) // 2]
    assert corpus.sequences(range(5, 6), 4096).tokens.max() < 256
    assert all("site-packages" not in d.path.parts for d in corpus.documents)
    assert standard_library() / "ast.py" in [d.path for d in corpus.documents]


def test_replicas_passes_and_steps_take_turns_at_the_stream() -> None:
    plan = Plan.from_splits(
        [Split((24,), (2,))], [Split((8,), (2,))], sequences=(3, 1), accumulation=2, world_size=3
    )

    taken = [
        sequences_of(plan, replica, step, turn)
        for step in range(3)
        for turn in range(2)
        for replica in range(2)
    ]

    assert [i for indices in taken for i in indices] == list(range(24))
    assert [len(indices) for indices in taken] == [3, 1] * 6


def test_an_idle_rank_gets_no_sequence(folder: Path) -> None:
    plan = Plan.from_splits([Split((8,), (2,))], world_size=2)

    pack = Corpus(folder).sequences(sequences_of(plan, None, 5, 0), plan.seq_len)

    assert pack.tokens.shape == (0,)
    assert pack.cu_seqlens.tolist() == [0]


def test_a_folder_within_an_installation_is_a_folder(tmp_path: Path) -> None:
    root = tmp_path / "site-packages" / "books"
    (root / "site-packages").mkdir(parents=True)
    (root / "a.py").write_text("aa", encoding="utf-8")
    (root / "site-packages" / "b.py").write_text("bb", encoding="utf-8")

    assert [document.path.name for document in Corpus(root).documents] == ["a.py"]


def test_a_pattern_that_leads_out_of_the_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pattern is '/books/.*'"):
        Corpus(tmp_path, pattern="/books/*.py")
