"""Training steps of a transformers Llama under FSDP2, beside its peers; run by torchrun:

    torchrun --nproc-per-node 4 bench/hf_llama.py --name NAME [--layers 6] [IMPL/CASE ...]

    hexiseq-heads, -hybrid, -uneven   this package: see multi_layouts.py
    ulysses                           plain all-to-alls around cuDNN, a call a document
    torch-cp                          PyTorch's context_parallel around cuDNN; one document only

    one       one document of all tokens
    packed    documents with a long tail of lengths, in another order for each seed
    longest   the most tokens that fit: by a line through the memory of two steps, and then tried,
              in documents of 8,192 tokens (torch-cp: by the line alone, it has one long document)

Alike for all: Llama-3-8B's width and vocabulary, float32 parameters computed in bf16, every decoder
layer recomputed, the loss in chunks, AdamW, the first weights. Each seed draws other tokens. A step
is timed on the slowest rank, host included, after one of the same shapes; memory is the fullest
rank's: what its tensors took at most, and what the whole device held.

A job that fails or takes longer than `--seconds` ends the process. The same command again, with the
same `--name`, goes on with the job after it.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import hf_peers
import measure
import torch
import torch.distributed as dist
import transformers
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

MODEL = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 1 << 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
SEEDS = 3
DOCUMENT = 8192
SHORTEST = 16
FULL = 0.95
"""How full the device shall be in the step that tries the longest sequence."""
Sharding = Callable[[Pack], AbstractContextManager[Call]]
JOBS = (
    "hexiseq-heads/packed", "ulysses/packed",
    "hexiseq-heads/one", "ulysses/one", "torch-cp/one",
    "hexiseq-heads/longest", "ulysses/longest", "torch-cp/longest",
    "hexiseq-hybrid/packed", "hexiseq-uneven/packed",
)  # fmt: skip


class Decoder(nn.Module):
    """A causal LM that returns its summed loss; the logits never exist whole."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = LlamaConfig(num_hidden_layers=layers, **MODEL)
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


def long_tailed(tokens: int, seed: int) -> tuple[int, ...]:
    """Return log-normal lengths that add up to `tokens`; a seed gives their order alone."""
    draw = random.Random(0)
    lengths: list[int] = []
    while tokens:
        length = min(tokens, max(SHORTEST, int(draw.lognormvariate(7.0, 1.6))))
        lengths.append(tokens if tokens - length < SHORTEST else length)
        tokens -= lengths[-1]
    random.Random(seed).shuffle(lengths)
    return tuple(lengths)


def pack_of(lengths: tuple[int, ...], seed: int) -> Pack:
    """Return random ids with shifted labels and positions."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(MODEL["vocab_size"], (sum(lengths),), generator=draw)
    end = torch.tensor([IGNORED_LABEL])
    labels = torch.cat([torch.cat((document[1:], end)) for document in ids.split(lengths)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    return ids.cuda(), labels.cuda(), positions.cuda(), lengths


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


def forget_peaks() -> None:
    """Let the next step's memory be its own."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def memory_gib() -> dict[str, float]:
    """Return the most that tensors took since `forget_peaks`, and what the whole device holds."""
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_gib": round(slowest(torch.cuda.max_memory_allocated()) / 2**30, 2),
        "device_gib": round(slowest(total - free) / 2**30, 2),
    }


def speed(
    name: str, case: str, model: Decoder, optimizer: torch.optim.Optimizer, tokens: int
) -> dict[str, Any]:
    """Return the seconds of a step with each seed, after a step of the same shapes."""
    seeds = range(SEEDS)
    lengths = [(tokens,) if case == "one" else long_tailed(tokens, seed) for seed in seeds]
    packs = [pack_of(each, seed) for each, seed in zip(lengths, seeds, strict=True)]
    with implementation(name, model, tokens) as cut:
        first = step(model, optimizer, cut, packs[0])
        forget_peaks()
        found = [timed(lambda p=pack: step(model, optimizer, cut, p)) for pack in packs]
        memory = memory_gib()
    seconds = [second for second, _ in found]
    return {
        "tokens": tokens,
        "documents": len(lengths[0]),
        "step_seconds": [round(second, 4) for second in seconds],
        "tokens_per_s_per_gpu": round(
            tokens / dist.get_world_size() / statistics.median(seconds), 1
        ),
        "losses": [round(loss, 5) for loss in (first, *(loss for _, loss in found))],
        **memory,
    }


def longest(
    name: str, model: Decoder, optimizer: torch.optim.Optimizer, tokens: int
) -> Iterator[dict[str, Any]]:
    """Yield the tokens that fit by the line through two steps' memory; then try nearly as many."""

    def held_after(tokens: int) -> float:
        document = tokens if name == "torch-cp" else DOCUMENT
        pack = pack_of((document,) * (tokens // document), 0)
        forget_peaks()
        with implementation(name, model, tokens) as cut:
            step(model, optimizer, cut, pack)
            return memory_gib()["device_gib"]

    held_after(tokens)  # the optimizer's state comes with the first step
    small, large = held_after(tokens), held_after(2 * tokens)
    total = torch.cuda.mem_get_info()[1] / 2**30
    slope = (large - small) / tokens
    unit = dist.get_world_size() * DOCUMENT
    wanted = int((FULL * total - small) / slope) // unit * unit + tokens
    line = {
        "line_gib": {tokens: small, 2 * tokens: large},
        "device_total_gib": round(total, 2),
        "tokens_by_line": int(tokens + (total - small) / slope),
    }
    yield line
    if name != "torch-cp":
        yield line | {"tokens_that_ran": wanted, "device_gib": held_after(wanted)}


def run(job: str, model: Decoder, first: dict[str, torch.Tensor], tokens: int) -> None:
    """Do a job from the first weights, and keep what it finds."""
    name, case = job.split("/")
    with torch.no_grad():
        for key, parameter in model.state_dict().items():
            parameter.to_local().copy_(first[key])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    if case == "longest":
        for found in longest(name, model, optimizer, tokens):
            keep(job, model, found)
    else:
        keep(job, model, speed(name, case, model, optimizer, tokens))


def keep(job: str, model: Decoder, found: dict[str, Any]) -> None:
    """Append a line to the results, from rank 0 or a rank that failed."""
    if dist.get_rank() and "failed" not in found:
        return
    name, case = job.split("/")
    line = {"attention": name, "case": case, "layers": len(model.lm.model.layers), **found}
    print(line, flush=True)
    gpus, version = dist.get_world_size(), transformers.__version__
    measure.keep("hf_llama", gpus=gpus, transformers=version, **line)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", nargs="*", default=JOBS, metavar="IMPL/CASE")
    parser.add_argument("--name", required=True, help="names the run, to go on with it")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--seconds", type=float, default=120.0, help="the most a job may take")
    arguments = parser.parse_args()
    measure.RUN = arguments.name
    begun = measure.RESULTS / f"hf_llama.{arguments.name}.begun"
    measure.RESULTS.mkdir(parents=True, exist_ok=True)
    done = begun.read_text().split() if begun.exists() else []
    jobs = [job for job in arguments.jobs if job not in done]
    if not jobs:
        return
    start_world()
    hf.register()
    hf_peers.register()
    model = sharded(arguments.layers)
    first = {
        key: value.to_local().to("cpu", copy=True) for key, value in model.state_dict().items()
    }
    for job in jobs:
        dist.barrier()
        if dist.get_rank() == 0:
            with begun.open("a") as names:
                names.write(f"{job}\n")
        faulthandler.dump_traceback_later(arguments.seconds, exit=True)
        try:
            run(job, model, first, arguments.tokens)
        except Exception as error:
            traceback.print_exc()
            text = f"rank {dist.get_rank()}: {type(error).__name__}: {str(error)[:300]}"
            keep(job, model, {"failed": text})
            sys.stderr.flush()
            os._exit(1)  # the other ranks may wait for this one: torchrun ends them
        faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
