"""Training steps of a transformers Llama under FSDP2, beside its peers; run by torchrun:

    torchrun --nproc-per-node 4 bench/hf_llama.py [--layers 4] [--tokens 131072] [IMPL ...]

    hexiseq-heads, -hybrid, -uneven   this package: see multi_layouts.py
    ulysses                           plain all-to-alls around cuDNN, a call a document
    torch-cp                          PyTorch's context_parallel around cuDNN; one document only

Alike for all: Llama-3-8B's width and vocabulary, float32 parameters computed in bf16, every decoder
layer recomputed, the loss in chunks, AdamW. A step is timed on the slowest rank, host included;
memory is the fullest rank's. Each seed draws other tokens, and other document lengths where packed.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import hf_peers
import measure
import torch
import torch.distributed as dist
from hf_peers import Call, Pack
from multi_layouts import Shape, plan_of
from multi_timing import start_world
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

import hexiseq_triton as hx
from hexiseq_triton.cross_entropy import summed_cross_entropy
from hexiseq_triton.integrations import hf
from hexiseq_triton.shard import IGNORED_LABEL

VOCAB = 128256
SEEDS = 3
Sharding = Callable[[Pack], AbstractContextManager[Call]]
IMPLS = ("hexiseq-heads", "ulysses", "torch-cp", "hexiseq-hybrid", "hexiseq-uneven")


class Decoder(nn.Module):
    """A causal LM that returns its summed loss; the logits never exist whole."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=1 << 20,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        )  # fmt: skip
        self.lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        self.lm.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, labels: torch.Tensor, **inputs: Any) -> torch.Tensor:
        hidden = self.lm.model(**inputs).last_hidden_state
        return summed_cross_entropy(hidden[0], self.lm.lm_head.weight, labels)


def sharded(layers: int) -> Decoder:
    """Return the decoder under FSDP2, with the same random weights in each run."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Decoder(layers)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.lm.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model.train(), mp_policy=policy)


def lengths_of(tokens: int, packed: bool, seed: int) -> tuple[int, ...]:
    """Return one document, or lengths drawn log-normally with a long tail."""
    if not packed:
        return (tokens,)
    draw = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(tokens - sum(lengths), max(16, int(draw.lognormvariate(7.0, 1.6)))))
    return tuple(lengths)


def pack_of(tokens: int, packed: bool, seed: int) -> Pack:
    """Return random ids with shifted labels and positions."""
    lengths = lengths_of(tokens, packed, seed)
    draw = torch.Generator().manual_seed(seed)
    documents = torch.randint(VOCAB, (tokens,), generator=draw).split(lengths)
    end = torch.tensor([IGNORED_LABEL])
    labels = torch.cat([torch.cat((ids[1:], end)) for ids in documents])
    positions = torch.cat([torch.arange(length) for length in lengths])
    return torch.cat(documents).cuda(), labels.cuda(), positions.cuda(), lengths


@contextmanager
def implementation(name: str, model: Decoder, tokens: int) -> Iterator[Sharding]:
    """Put an implementation into the model; yield how it cuts a batch."""
    if not name.startswith("hexiseq-"):
        model.lm.set_attn_implementation(f"bench_{name.replace('-', '_')}")
        yield {"ulysses": hf_peers.ulysses, "torch-cp": hf_peers.torch_cp}[name]
        return
    plan = plan_of(name.removeprefix("hexiseq-"), Shape((tokens,)), dist.get_world_size())
    model.lm.set_attn_implementation(hf.NAME)
    with hx.init(plan) as context:

        @contextmanager
        def cut(pack: Pack) -> Iterator[Call]:
            ids, labels, _, lengths = pack
            unshifted = torch.cat((ids[:1], labels[:-1]))  # sharding shifts again
            bounds = torch.tensor([0, *lengths]).cumsum(0)
            batch = hf.shard(context, {"input_ids": ids, "labels": unshifted}, cu_seqlens=bounds)
            yield batch.inputs, batch.labels[0], int((labels >= 0).sum())

        yield cut


def step(model: Decoder, optimizer: torch.optim.Optimizer, cut: Sharding, pack: Pack) -> float:
    """Take one optimizer step; return its mean loss."""
    with cut(pack) as (inputs, labels, num_tokens):
        loss = model(labels, **inputs)
        # FSDP2 averages the ranks' gradients
        (loss * (dist.get_world_size() / num_tokens)).backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach() / num_tokens
    dist.all_reduce(total)
    return float(total)


def slowest(value: float) -> float:
    """Return the largest of the ranks' values."""
    found = torch.tensor(value, device="cuda", dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def timed(call: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds of the slowest rank and the loss."""
    torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    loss = call()
    torch.cuda.synchronize()
    return slowest(time.perf_counter() - began), loss


def run(name: str, model: Decoder, tokens: int, packed: bool) -> None:
    """Measure an implementation and keep the result."""
    before = {key: value.to_local().cpu() for key, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with implementation(name, model, tokens) as cut:
        packs = [pack_of(tokens, packed, seed) for seed in range(SEEDS)]
        first = step(model, optimizer, cut, packs[0])
        found = [timed(lambda p=pack: step(model, optimizer, cut, p)) for pack in packs]
    free, total = torch.cuda.mem_get_info()
    with torch.no_grad():
        for key, parameter in model.state_dict().items():
            parameter.to_local().copy_(before[key])  # each begins with the same weights
    seconds = [second for second, _ in found]
    world = dist.get_world_size()
    result = {
        "impl": name,
        "layers": len(model.lm.model.layers),
        "tokens": tokens,
        "documents": [len(pack[3]) for pack in packs],
        "step_seconds": [round(second, 4) for second in seconds],
        "tokens_per_s_per_gpu": round(tokens / world / statistics.median(seconds), 1),
        "peak_gib": round(slowest(torch.cuda.max_memory_allocated()) / 2**30, 2),
        "device_gib": round(slowest(total - free) / 2**30, 2),
        "losses": [round(loss, 5) for loss in (first, *(loss for _, loss in found))],
    }
    if dist.get_rank() == 0:
        print(result, flush=True)
        measure.keep("hf_llama", gpus=world, **result)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("impls", nargs="*", default=IMPLS, metavar="IMPL")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--packed", action="store_true")
    arguments = parser.parse_args()
    start_world()
    hf.register()
    hf_peers.register()
    model = sharded(arguments.layers)
    for name in arguments.impls:
        run(name, model, arguments.tokens, arguments.packed)
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
