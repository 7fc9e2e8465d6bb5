"""Hugging Face transformers: decoder models under an uneven plan, through their public hooks.

    hf.register()                                   # once a process
    model.set_attn_implementation("hexiseq")
    batch = hf.shard(context, {"input_ids": ids, "labels": labels}, cu_seqlens=cu_seqlens)
    logits = model(**batch.inputs).logits           # this rank's tokens
    loss = batch.token_mean(logits, grad_average=context.mesh.size())

The context and the layout travel with the call, as its keyword `hexiseq`: nothing is kept between
calls, so two plans can take turns in one process. transformers' attention functions get q, k and v
as [1, heads, T, D], already turned by RoPE, and return [1, T, heads, D].

A rank without tokens would call its model with none, which transformers' models do not take. It
runs one padding token instead: a document of its own that nothing attends to, without a label.

Only models whose tokens meet in attention alone equal themselves; others are refused (`hf_models`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from hexiseq_triton.attention import hexiseq_attention
from hexiseq_triton.context import ParallelContext
from hexiseq_triton.errors import InputError
from hexiseq_triton.integrations.hf_models import check_arguments, check_layers, check_lengths
from hexiseq_triton.shard import IGNORED_LABEL, LocalBatch
from hexiseq_triton.shard import shard as shard_rows

NAME = "hexiseq"
PADDING_TOKEN = 0
_LENGTHS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def register(name: str = NAME) -> None:
    """Make `model.set_attn_implementation(name)` known to transformers; again is harmless.

    Raises:
        InputError: if transformers would take `name` for one of its own flash kernels.
    """
    if "flash" in name:
        raise InputError(f"name is {name!r}; transformers treats names with 'flash' specially")
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, no_mask)


class _Calls:
    """Whether a model's layers called `attention` with a batch."""

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
            InputError: if the model that was called with this batch did not attend by `attention`.
        """
        with self.context.guard():
            if not self._calls.attended:
                raise InputError(
                    f"the model's layers did not call {NAME!r}, so each rank saw its own tokens "
                    f"alone: call model.set_attn_implementation({NAME!r}) before "
                    "model(**batch.inputs); models that transformers does not let choose their "
                    "attention, and those without attention, are not supported"
                )
        loss = F.cross_entropy(
            logits.float().flatten(0, 1),
            self.labels.flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
        )
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
    do not count on; else each row of `input_ids` is one. Labels are shifted here.

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
        mask = batch.get("attention_mask")
        if mask is not None and not bool(mask.all()):
            problem = (
                "attention_mask hides tokens; pack the documents without padding, for example with "
                "DataCollatorWithFlattening"
            )
        cu_seqlens = _documents(batch) if cu_seqlens is None else cu_seqlens
        dropped = (*_LENGTHS, "attention_mask", "position_ids")
        batch = {name: tensor for name, tensor in batch.items() if name not in dropped}
        problem = problem or _misfit(batch)
    with context.guard():
        rows = shard_rows(context, batch, cu_seqlens=cu_seqlens, source=source, problem=problem)
    return HFBatch(context, rows)


def _misfit(batch: Mapping[str, Any]) -> str | None:
    """Say what of a batch is no tensor of its tokens, or would be dropped."""
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        return f"the batch has no tensor input_ids, only {', '.join(batch) or 'nothing'}"
    for name, tensor in batch.items():
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
    positions = batch.get("position_ids")
    if positions is None:
        return None
    rows = positions.reshape(-1, positions.shape[-1])
    begins = rows != F.pad(rows, (1, 0))[:, :-1] + 1
    begins[:, 0] = True
    starts = begins.flatten().nonzero().flatten()
    return F.pad(starts, (0, 1), value=rows.numel())


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers asks; the function behind the name.

    Args:
        module: the model's attention layer; its `is_causal` holds unless the argument is given.
        query: [1, H, T, D].
        key: [1, H_kv, T, D].
        value: as key.
        attention_mask: only None; `no_mask` lets through what it cannot leave out.
        scaling: multiplies q . k; D ** -0.5 if left out.
        dropout: only 0.0.
        sliding_window: tokens that a token sees, itself included.
        softcap: caps scores at c * tanh(s / c).
        s_aux: learnable sinks, [H].
        is_causal: a token sees none after itself.
        arguments: the model call's others, `hexiseq` among them.

    Returns:
        The output, [1, T, H, D], and no attention weights.

    Raises:
        InputError: if `hexiseq` is missing, or something is asked for that is not supported; the
            other ranks hear of the latter, while nothing leads from a call without it to them.
    """
    batch = arguments.get(NAME)
    if not isinstance(batch, HFBatch):
        raise InputError(
            f"the model was called without {NAME}=; call it as model(**batch.inputs) with the "
            "batch of hexiseq_triton.integrations.hf.shard (to generate, choose another attention "
            f"again; if it was so called, {type(module).__name__} gets no keywords from its model, "
            "which is not supported)"
        )
    batch._calls.attended = True
    with batch.context.guard():
        _check(batch, query, key, attention_mask, dropout)
        check_arguments(module, arguments)
        check_lengths(module, batch.local.layout, sliding_window)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    rows = batch.num_tokens
    dtype = _compute_dtype(query)
    q, k, v = (x[0].transpose(0, 1)[:rows].to(dtype) for x in (query, key, value))
    out = hexiseq_attention(
        q,
        k,
        v,
        batch.context,
        batch.local.layout,
        softmax_scale=scaling,
        causal=causal,
        window_size=_window(sliding_window, causal),
        softcap=softcap or 0.0,
        learnable_sink=s_aux,
    )
    return F.pad(out, (0, 0, 0, 0, 0, int(batch.is_padded)))[None], None


def _check(
    batch: HFBatch,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
) -> None:
    rows = batch.num_tokens + batch.is_padded
    if dropout:
        raise InputError(
            f"attention dropout is {dropout}; it is not supported: set attention_dropout to 0.0"
        )
    if attention_mask is not None:
        raise InputError(
            "attention_mask hides tokens or is a bias; only packed documents work: call the model "
            "as model(**batch.inputs)"
        )
    if key.shape[2] != query.shape[2]:
        raise InputError(
            f"{query.shape[2]} queries meet {key.shape[2]} keys; decoding with a KV cache is not "
            "supported: call the model with use_cache=False"
        )
    if query.shape[0] != 1 or query.shape[2] != rows:
        raise InputError(
            f"attention got [{query.shape[0]}, {query.shape[2]}] tokens; the batch holds "
            f"[1, {rows}]: call the model as model(**batch.inputs)"
        )


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype to attend in: under autocast rotary tables may have made q and k float32."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _window(sliding_window: int | None, causal: bool) -> tuple[int, int]:
    """Return flash-attention's window: it does not count the token itself, transformers does."""
    if sliding_window is None:
        return (-1, -1)
    return (sliding_window - 1, 0 if causal else sliding_window - 1)


def no_mask(
    *_: Any, attention_mask: torch.Tensor | None = None, config: Any = None, **__: Any
) -> torch.Tensor | None:
    """Make no mask, the layout knows the documents; attention refuses one that hides tokens.

    Raises:
        InputError: if some of the model's layers do not attend.
    """
    check_layers(config)
    if attention_mask is not None and not bool(attention_mask.all()):
        return attention_mask
    return None
