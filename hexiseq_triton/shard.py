"""A global batch to local rows, and back.

Labels are shifted before the batch is cut, and never across documents: a cut may run through a
document, and the last token of a shard still learns the first of the next. Position ids are counted
per document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hexiseq_triton.agreement import listed
from hexiseq_triton.errors import InputError, PeerError
from hexiseq_triton.layout import BatchLayout
from hexiseq_triton.segments import Segment

if TYPE_CHECKING:
    from hexiseq_triton.context import ParallelContext

IGNORED_LABEL = -100
_FAILED, _FOLLOWS = "failed: ", "follows"
"""What a rank answers of its batch instead of a fingerprint: its problem follows, or no batch."""


@dataclass(frozen=True)
class LocalBatch(Mapping[str, torch.Tensor]):
    """One rank's rows of a batch; maps the names of the batch's tensors to local ones.

    Attributes:
        tensors: local rows of each tensor of the batch, [T, ...]; labels are shifted.
        position_ids: position of each row in its document, [T] int64.
        cu_seqlens: bounds of this rank's pieces of documents, [pieces + 1] int32.
        layout: who holds what; attention needs it.
    """

    tensors: dict[str, torch.Tensor]
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    layout: BatchLayout

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def shard(
    context: ParallelContext,
    batch: Mapping[str, torch.Tensor] | None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    source: int | None = None,
    problem: str | None = None,
) -> LocalBatch:
    """Return this rank's rows of a batch; a collective call of the ranks of a replica.

    Args:
        context: the live plan.
        batch: the replica's tensors, each [T, ...] or [B, S, ...]; `labels`, if there, unshifted.
            The same on every rank of the replica. Idle ranks may pass what they like, of which
            they get no rows; its names, dtypes and inner shapes are kept.
        cu_seqlens: bounds of the documents in the stream of T (or B * S) tokens, [docs + 1]. Left
            out, a [T] stream is one document and each row of a [B, S] batch is one.
        source: take the batch of the replica's rank at this position (0: its first) instead; the
            others may pass None. The same on every rank of the replica. Nobody sends to an idle
            rank, which passes tensors of its own in any case.
        problem: what the caller has found wrong with this rank's batch.

    Raises:
        InputError: the same on all ranks of the replica, if the batch is malformed on any of them
            or differs between them.
        PeerError: if another rank failed or stopped answering.
    """
    stream: dict[str, torch.Tensor] = {}
    lengths: list[int] = []
    idle, ranks = context.replica is None, context.replica_ranks
    counts = idle or source is None or ranks.index(context.rank) == source
    if source is not None and not idle and not 0 <= source < len(ranks):
        problem = (
            f"source is {source}; replica {context.replica} has positions 0 to {len(ranks) - 1}"
        )
    if idle and batch is None:
        problem = "this rank is idle, nobody sends it a batch; pass tensors of the batch's names"
    if counts and problem is None:
        try:
            stream, lengths = _as_stream(batch, cu_seqlens)
        except InputError as error:
            problem = str(error)
    _agree(context, stream, lengths, problem, source)
    if source is not None:
        stream, lengths = _broadcast(context, stream, lengths, source)
    if idle:
        stream, lengths = {name: tensor[:0] for name, tensor in stream.items()}, []

    layout = BatchLayout(context.plan, context.rank, lengths, context.calls.next_batch())
    if "labels" in stream:
        stream["labels"] = _shifted(stream["labels"], lengths)
    rows = _rows(layout.segments, lengths)
    bounds = [0, *accumulate(segment.num_tokens for segment in layout.segments)]
    return LocalBatch(
        {
            name: tensor[rows.to(tensor.device)].to(context.device)
            for name, tensor in stream.items()
        },
        _positions(layout.segments).to(context.device),
        torch.tensor(bounds, dtype=torch.int32, device=context.device),
        layout,
    )


def unshard(context: ParallelContext, local: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
    """Return all rows of the replica's batch in their first order; a collective call.

    It carries no gradient. An idle rank gets no rows.

    Args:
        context: the live plan.
        local: this rank's rows, [T, ...]; inner shape and dtype alike on all ranks.
        layout: the layout that `shard` returned.

    Raises:
        InputError: if `local` has another number of rows, or needs a gradient; the same on all
            ranks of the replica, if its inner shape, dtype or the batch differs between them.
    """
    context.check_layout(layout)
    if local.requires_grad and torch.is_grad_enabled():
        raise InputError("unshard carries no gradient; pass local.detach()")
    if local.dim() == 0 or local.shape[0] != layout.num_tokens:
        raise InputError(
            f"local has shape {tuple(local.shape)}; rank {context.rank} holds "
            f"{layout.num_tokens} rows"
        )
    inner = f"{local.dtype} with inner shape {tuple(local.shape[1:])}"
    answers = context.gather_in_replica("unshard", f"{inner}, of {layout.name}")
    if len(set(answers)) > 1:
        raise InputError(
            f"ranks unshard different tensors\n{listed(context.replica_ranks, answers)}"
        )
    held = layout.segments_of_rank
    blocks = {
        rank: local.new_empty(sum(s.num_tokens for s in segments), *local.shape[1:])
        for rank, segments in held.items()
    }
    own = local.contiguous()
    context.routes.start(
        [(rank, own) for rank in blocks], list(blocks.items()), "the gathering of rows"
    ).wait()
    whole = local.new_empty(layout.total_tokens, *local.shape[1:])
    for rank, block in blocks.items():
        whole[_rows(held[rank], layout.document_lengths).to(local.device)] = block
    return whole


# -------------------------------------------------------------------- the batch as one stream


def _as_stream(
    batch: Mapping[str, torch.Tensor] | None, cu_seqlens: torch.Tensor | None
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return the tensors as [T, ...] and the document lengths."""
    if batch is not None and not isinstance(batch, Mapping):
        raise InputError(
            f"the batch is a {type(batch).__name__}; pass a mapping of names to tensors"
        )
    if not batch:
        raise InputError("the batch is empty; pass at least one tensor, or source=")
    for name, tensor in batch.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
            raise InputError(
                f"{name} is {str(tensor)[:40]}, a {type(tensor).__name__}; all of the batch must "
                "be tensors that begin with the tokens: leave others out"
            )
    labels = batch.get("labels")
    if labels is not None and not labels.dtype.is_signed:
        raise InputError(
            f"labels are {labels.dtype}, which cannot hold {IGNORED_LABEL}, the label of a "
            "document's last token; use torch.int64"
        )
    first = min(batch.values(), key=torch.Tensor.dim)  # token ids say what is a row
    if cu_seqlens is None:
        dims = min(first.dim(), 2)
        lengths = [first.shape[dims - 1]] * (first.shape[0] if dims == 2 else 1)
    else:
        lengths = _lengths(cu_seqlens)
        dims = 1 if first.dim() == 1 or first.shape[0] == sum(lengths) else 2
    stream = {}
    for name, tensor in batch.items():
        if tensor.dim() < dims or tensor.shape[:dims] != first.shape[:dims]:
            raise InputError(
                f"{name} has shape {tuple(tensor.shape)}; all tensors must begin with "
                f"{tuple(first.shape[:dims])}, the tokens (pass cu_seqlens for a packed stream)"
            )
        stream[name] = tensor.flatten(0, dims - 1)
    total = next(iter(stream.values())).shape[0]
    if total != sum(lengths):
        raise InputError(f"cu_seqlens ends at {sum(lengths)}; the batch has {total} tokens")
    return stream, lengths


def _lengths(cu_seqlens: torch.Tensor) -> list[int]:
    if not isinstance(cu_seqlens, torch.Tensor):
        raise InputError(
            f"cu_seqlens is a {type(cu_seqlens).__name__}; it must be a tensor, int32 or int64, "
            "[documents + 1]"
        )
    bounds = cu_seqlens.tolist()
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; it must be "
            "int32 or int64, [documents + 1]"
        )
    if not bounds or bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
        raise InputError(f"cu_seqlens must begin with 0 and never fall; it is {bounds[:8]}...")
    return [b - a for a, b in pairwise(bounds)]


def _agree(
    context: ParallelContext,
    stream: Mapping[str, torch.Tensor],
    lengths: Sequence[int],
    problem: str | None,
    source: int | None,
) -> None:
    """Let all ranks of the replica raise the same error, or go on with the same batch."""
    answer = f"{_FAILED}{problem}" if problem else _fingerprint(stream, lengths)
    if source is not None and not problem and not stream:
        answer = _FOLLOWS
    given = context.gather_in_replica("shard", f"source={source} {answer}")
    sources, answers = zip(*(each.split(" ", 1) for each in given), strict=True)
    failed = [
        f"rank {rank}: {told.removeprefix(_FAILED)}"
        for rank, told in zip(context.replica_ranks, answers, strict=True)
        if told.startswith(_FAILED)
    ]
    if failed:
        raise InputError("\n".join(failed))
    if len(set(sources)) > 1:
        raise InputError(
            f"the ranks of replica {context.replica} name different sources; pass the same "
            f"source= on all of them\n{listed(context.replica_ranks, sources)}"
        )
    if len(set(answers) - {_FOLLOWS}) > 1:
        raise InputError(
            f"the ranks of replica {context.replica} hold different batches; give them the same "
            f"one, or use source=0\n{listed(context.replica_ranks, answers)}"
        )


def _fingerprint(stream: Mapping[str, torch.Tensor], lengths: Sequence[int]) -> str:
    digest = hashlib.blake2b(repr(list(lengths)).encode(), digest_size=12)
    for name, tensor in stream.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _broadcast(
    context: ParallelContext, stream: dict[str, torch.Tensor], lengths: list[int], source: int
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return the batch of the replica's rank at position `source` on all its ranks."""
    group = context.routes.group
    if group is None:
        return stream, lengths
    content = [({name: tensor.cpu() for name, tensor in stream.items()}, lengths)]
    try:
        dist.broadcast_object_list(content, group=group, group_src=source, device=context.device)
    except RuntimeError as error:
        raise PeerError(f"the broadcast of the batch failed: {error}") from error
    return content[0]


# -------------------------------------------------------------------- rows


def _shifted(labels: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return for each token the label of the next one in its document, -100 for the last."""
    shifted = labels.new_full(labels.shape, IGNORED_LABEL)
    if labels.shape[0]:
        shifted[:-1] = labels[1:]
        last = torch.tensor([stop - 1 for stop in accumulate(lengths)], device=labels.device)
        shifted[last[torch.tensor(lengths, device=labels.device) > 0]] = IGNORED_LABEL
    return shifted


def _rows(segments: Sequence[Segment], lengths: Sequence[int]) -> torch.Tensor:
    """Return the rows of the global stream that the segments name, [T] int64."""
    starts = [0, *accumulate(lengths)]
    return _joined((starts[s.document] + s.start, starts[s.document] + s.stop) for s in segments)


def _positions(segments: Sequence[Segment]) -> torch.Tensor:
    return _joined((s.start, s.stop) for s in segments)


def _joined(ranges: Iterator[tuple[int, int]]) -> torch.Tensor:
    # named, or they would go to what torch.set_default_device says
    parts = [torch.arange(start, stop, device="cpu") for start, stop in ranges]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")
