"""A batch as Hugging Face's decoder models take it: this rank's tokens of packed documents.

A rank without tokens would call its model with none, which transformers' models do not take. It
runs one padding token instead: a document of its own that nothing attends to, without a label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from hexiseq_triton.context import ParallelContext
from hexiseq_triton.cross_entropy import summed_cross_entropy_of_logits
from hexiseq_triton.errors import InputError
from hexiseq_triton.shard import IGNORED_LABEL, LocalBatch
from hexiseq_triton.shard import shard as shard_rows

NAME = "hexiseq"
"""Of the attention, and of the keyword by which a model call carries its batch."""
PADDING_TOKEN = 0
_REPLACED = (
    "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "attention_mask", "position_ids",
)  # fmt: skip
"""What collators say of documents, which the model gets anew from the layout."""


class _Calls:
    """Whether a model's layers called `hf.attention` with a batch."""

    attended = False


@dataclass(frozen=True)
class HFBatch:
    """One rank's tokens of a batch, as transformers' models take them.

    Attributes:
        context: the live plan.
        local: this rank's rows; labels are shifted.
    """

    context: ParallelContext
    local: LocalBatch
    _calls: _Calls = field(default_factory=_Calls, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        """This rank's tokens."""
        return self.local.position_ids.shape[0]

    @property
    def is_padded(self) -> bool:
        """Whether this rank has no token and runs the padding token instead."""
        return self.num_tokens == 0

    @property
    def inputs(self) -> dict[str, Any]:
        """What the model is called with: ids and positions as [1, T], and this batch."""
        return {
            "input_ids": self._row(self.local["input_ids"], PADDING_TOKEN),
            "position_ids": self._row(self.local.position_ids, 0),
            "use_cache": False,
            NAME: self,
        }

    def note_attention(self) -> None:
        """Take note that a layer attends with this batch; `token_mean` wants one that did."""
        self._calls.attended = True

    @property
    def labels(self) -> torch.Tensor:
        """The next token of each token, [1, T] int64; -100 where none counts."""
        return self._row(self._labels, IGNORED_LABEL)

    @property
    def num_label_tokens(self) -> int:
        """This rank's tokens that have a label."""
        return int((self._labels != IGNORED_LABEL).sum())

    def token_mean(
        self, logits: torch.Tensor, *, grad_average: int, num_tokens: int | None = None
    ) -> torch.Tensor:
        """Return the mean cross entropy over all ranks' labels; a collective call.

        Args:
            logits: this rank's, [1, T, vocab].
            grad_average: over how many ranks the wrapper averages gradients: FSDP2's or DDP's
                mesh size; 1 without a wrapper.
            num_tokens: this rank's labels of the whole step, where the step has several passes;
                those of this batch if left out.

        Raises:
            InputError: if the model called with this batch did not attend by `hf.attention`.
        """
        with self.context.guard():
            if not self._calls.attended:
                raise InputError(
                    f"the model's layers did not call {NAME!r}, so each rank saw its own tokens "
                    f"alone: call model.set_attn_implementation({NAME!r}) before "
                    "model(**batch.inputs); models that transformers does not let choose their "
                    "attention, and those without attention, are not supported"
                )
            if logits.shape[:2] != self.labels.shape:
                raise InputError(
                    f"logits have shape {tuple(logits.shape)}; the loss needs those of all of the "
                    f"batch's tokens, {tuple(self.labels.shape)}: leave out logits_to_keep"
                )
        loss = summed_cross_entropy_of_logits(logits.flatten(0, 1), self.labels.flatten())
        count = self.num_label_tokens if num_tokens is None else num_tokens
        return self.context.token_mean(loss, count, grad_average=grad_average)

    @property
    def _labels(self) -> torch.Tensor:
        if "labels" not in self.local:
            raise InputError(
                f"the batch has no labels, only {', '.join(self.local)}; let the collator return "
                "them, unshifted, as DataCollatorForLanguageModeling(tokenizer, mlm=False) does"
            )
        return self.local["labels"]

    def _row(self, x: torch.Tensor, padding: int) -> torch.Tensor:
        return F.pad(x, (0, int(self.is_padded)), value=padding)[None]


def shard(
    context: ParallelContext,
    batch: Mapping[str, torch.Tensor] | None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    source: int | None = None,
) -> HFBatch:
    """Return this rank's tokens of a batch from a collator; a collective call of the replica.

    Documents come from `cu_seqlens`, or the batch's `cu_seq_lens_q`, or where its `position_ids`
    do not count on; else each row of `input_ids` is one. Positions count from 0 in each document;
    a batch that has others is refused. Labels are shifted here.

    Args:
        context: the live plan.
        batch: the replica's whole batch: `input_ids` and, to train, `labels`, [B, S] or [T].
        cu_seqlens: bounds of the documents in the stream of B * S tokens, [docs + 1].
        source: as in `ParallelContext.shard`.

    Raises:
        InputError: the same on all ranks of the replica, if the batch is padded or malformed on
            any of them or differs between them.
    """
    problem = None
    if batch is not None:
        problem = _misfit(batch)
        if problem is None:
            cu_seqlens = _documents(batch) if cu_seqlens is None else cu_seqlens
            problem = _other_positions(batch, cu_seqlens)
        batch = {name: tensor for name, tensor in batch.items() if name not in _REPLACED}
    with context.guard():
        rows = shard_rows(context, batch, cu_seqlens=cu_seqlens, source=source, problem=problem)
    return HFBatch(context, rows)


def _misfit(batch: Mapping[str, Any]) -> str | None:
    """Say what of a batch is no tensor of its tokens, or would be dropped."""
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        return f"the batch has no tensor input_ids, only {', '.join(batch) or 'nothing'}"
    mask = batch.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        return (
            "attention_mask hides tokens; pack the documents without padding, for example with "
            "DataCollatorWithFlattening"
        )
    positions = batch.get("position_ids")
    if positions is not None and positions.shape not in (ids.shape, (1, *ids.shape[-1:])):
        return (
            f"position_ids has shape {tuple(positions.shape)}; it must be that of input_ids, "
            f"{tuple(ids.shape)}: leave it out"
        )
    for name, tensor in batch.items():
        if name in _REPLACED:
            continue
        if not isinstance(tensor, torch.Tensor):
            return f"{name} is a {type(tensor).__name__}, not a tensor of the tokens: leave it out"
        if tensor.shape[: ids.dim()] != ids.shape:
            return (
                f"{name} has shape {tuple(tensor.shape)}; it must begin with that of input_ids, "
                f"{tuple(ids.shape)}: leave out what is not of the tokens"
            )
    types = batch.get("token_type_ids")
    if types is not None and bool(types.any()):
        return "token_type_ids are not all 0; the model does not get them: leave them out"
    return None


def _documents(batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the bounds of the documents that the batch itself tells of."""
    bounds = batch.get("cu_seq_lens_q")
    if bounds is not None:
        return bounds.flatten()
    positions = _positions(batch)
    if positions is None:
        return None
    begins = positions != F.pad(positions, (1, 0))[:, :-1] + 1
    begins[:, :1] = True
    starts = begins.flatten().nonzero().flatten()
    return F.pad(starts, (0, 1), value=positions.numel())


def _other_positions(batch: Mapping[str, torch.Tensor], cu_seqlens: Any) -> str | None:
    """Say so if the batch has positions that the model would not get."""
    positions = _positions(batch)
    if positions is None or not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dim() != 1:
        return None
    bounds = cu_seqlens.to(positions.device).long()
    lengths = bounds.diff()
    if bool((lengths < 0).any()) or int(lengths.sum()) != positions.numel():
        return None  # which `shard` refuses
    rows = torch.arange(positions.numel(), device=positions.device)
    if torch.equal(positions.flatten().long(), rows - bounds[:-1].repeat_interleave(lengths)):
        return None
    return (
        "position_ids do not count from 0 in each document, and the model would get those that "
        "do: leave them out, and pass the documents' bounds as cu_seqlens"
    )


def _positions(batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the batch's positions, [B, S]."""
    positions, ids = batch.get("position_ids"), batch["input_ids"]
    return None if positions is None else positions.expand(ids.shape if ids.dim() > 1 else (1, -1))
