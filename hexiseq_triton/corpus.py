"""Real text found on any machine: the source files of the running Python's standard library.

A file is a document, a byte a token. Documents stand one after the other in one endless stream,
shuffled anew each epoch, and sequence i is its tokens [i * seq_len, (i + 1) * seq_len): a pack of
documents, cut at both ends. A step takes the next sequences of the stream, so every token is seen
once an epoch, replicas see different ones, and how many tokens were taken says where to go on.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from hexiseq_triton.errors import ConfigError
from hexiseq_triton.planner import Plan

VOCAB = 256
_INSTALLED = {"site-packages", "dist-packages"}  # whatever a user added to the library


class Document(NamedTuple):
    """A file and its size in bytes."""

    path: Path
    num_tokens: int


class Pack(NamedTuple):
    """Documents in one stream: tokens [T] int64, and cu_seqlens [documents + 1] int32."""

    tokens: torch.Tensor
    cu_seqlens: torch.Tensor


def standard_library() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


class Corpus:
    """The documents of a folder as an endless stream of tokens.

    Args:
        folder: where the files are; the standard library if left out.
        pattern: which files count, as in `Path.rglob`.
        max_document_tokens: leave larger files out.
        seed: of the order of the documents.

    Raises:
        ConfigError: if no file is left.

    Attributes:
        documents: the files, in the order of their paths.
        num_tokens: tokens of an epoch.
        digest: a hash of the files' names and sizes.
        text: names the stream: the files, and their order.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        pattern: str = "*.py",
        max_document_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        root = standard_library() if folder is None else Path(folder)
        if not root.is_dir():
            problem = "there is no such folder"
            if root.exists():
                problem = f"this is a file: folder: {root.parent}, pattern: {root.name} reads it"
            raise ConfigError(f"corpus: folder is {root}; {problem}")
        try:
            found = list(root.rglob(pattern))
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(
                f"corpus: pattern is {pattern!r}: {error}; use one within the folder, such as *.py"
            ) from error
        paths = [p for p in found if not _INSTALLED.intersection(p.relative_to(root).parts)]
        sizes = ((path, path.stat().st_size) for path in sorted(paths) if path.is_file())
        most = max_document_tokens or float("inf")
        self.documents = [Document(path, size) for path, size in sizes if 0 < size <= most]
        self.num_tokens = sum(document.num_tokens for document in self.documents)
        held = [(str(path.relative_to(root)), size) for path, size in self.documents]
        self.digest = hashlib.blake2b(repr(held).encode(), digest_size=6).hexdigest()
        self.seed = seed
        self.text = f"documents {self.digest}, seed {seed}"
        self._order = lru_cache(maxsize=2)(self._shuffled)
        if not self.documents:
            sizes_that_fit = f"{most} bytes or fewer" if max_document_tokens else "any size"
            raise ConfigError(
                f"corpus: {root} holds no file {pattern} of {sizes_that_fit} that is not empty; "
                "name another folder or pattern, or raise max_document_tokens"
            )
        if self.num_tokens == len(self.documents):
            raise ConfigError(
                f"corpus: every file {pattern} of {root} is one byte: no token has a next one to "
                "predict; name another folder or pattern, or raise max_document_tokens"
            )

    def sequences(self, indices: range, seq_len: int, origin: int = 0) -> Pack:
        """Return consecutive sequences of the stream as one pack; no document crosses two.

        Args:
            indices: of the sequences.
            seq_len: tokens of each.
            origin: the token at which sequence 0 begins; below 0 if the stream's first token is in
                a later one.
        """
        parts, lengths = [], [0]
        for index in indices:
            first = origin + index * seq_len
            for document, start, stop in self._pieces(first, first + seq_len):
                parts.append(_read(document, start, stop))
                lengths.append(stop - start)
        tokens = (
            torch.cat(parts).long() if parts else torch.empty(0, dtype=torch.int64, device="cpu")
        )
        bounds = torch.tensor(list(accumulate(lengths)), dtype=torch.int32, device="cpu")
        return Pack(tokens, bounds)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[Document, int, int]]:
        """Yield the documents of the tokens [start, stop) of the stream, with the bytes to take."""
        while start < stop:
            epoch, at = divmod(start, self.num_tokens)
            documents, stops = self._order(epoch)
            index = bisect_right(stops, at)
            taken = min(stops[index], at + stop - start) - at
            first = at - (stops[index] - documents[index].num_tokens)
            yield documents[index], first, first + taken
            start += taken

    def _shuffled(self, epoch: int) -> tuple[list[Document], list[int]]:
        """Return an epoch's documents in order, and where in the epoch each ends."""
        documents = list(self.documents)
        random.Random(f"{self.seed} {epoch}").shuffle(documents)
        return documents, list(accumulate(document.num_tokens for document in documents))


def _read(document: Document, start: int, stop: int) -> torch.Tensor:
    with document.path.open("rb") as file:
        file.seek(start)
        found = bytearray(file.read(stop - start))
    if len(found) < stop - start:
        raise ConfigError(
            f"corpus: {document.path} had {document.num_tokens} bytes when the run began and has "
            f"{start + len(found)} or fewer now; leave documents as they are while they are read"
        )
    return torch.frombuffer(found, dtype=torch.uint8)


def sequences_of(plan: Plan, replica: int | None, step: int, turn: int) -> range:
    """Return which sequences of the stream a replica trains on in one pass of one step.

    Args:
        plan: the plan.
        replica: index of the replica; None, an idle rank, gets none.
        step: optimizer steps done before.
        turn: which of the step's `plan.accumulation` passes.
    """
    if replica is None:
        return range(0)
    a_pass = sum(each.sequences for each in plan.replicas)
    before = sum(each.sequences for each in plan.replicas[:replica])
    first = step * plan.global_batch + turn * a_pass + before
    return range(first, first + plan.replicas[replica].sequences)
