"""A Llama in plain PyTorch under an uneven plan: FSDP2, torch.compile, attention outputs kept.

    torchrun --nproc-per-node 4 examples/fsdp2_llama.py [--plan plan.json] [--steps 20] [--compile]

A block runs twice for backward, except its attention: what leaves the attention is kept, since it
costs the most to make again and, in a plan, messages too.

--compile compiles the whole model and prints where the compiler stopped. Where a rank is alone
in its replica, attention is one operation of the graph. Else it is kept out of the graph, a stop in
each block, since its messages are decided on the host.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import hexiseq_triton as hx
from hexiseq_triton.corpus import VOCAB, Corpus, sequences_of
from hexiseq_triton.rope import apply_rope, rope_tables

CLUSTER = "examples/clusters/2-fast-2-slow.yaml"
HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 344, 4, 8, 4, 16  # the preset "tiny"


class Block(nn.Module):
    """A decoder layer on packed rows, [T, hidden]."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def before(self, x, rope):
        """Return queries, keys and values, [T, heads, head_dim]."""
        projected = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = projected.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        return apply_rope(q, *rope), apply_rope(k, *rope), v

    def after(self, x, o):
        """Return the layer's output from that of its attention."""
        x = x + self.out(o.flatten(1))
        gate, up = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def forward(self, x, rope, attend):
        o = attend(*checkpoint(self.before, x, rope, use_reentrant=False))
        return checkpoint(self.after, x, o, use_reentrant=False)


class Llama(nn.Module):
    """The decoder; returns the sum of the token losses."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, batch, attend):
        rope = rope_tables(batch.position_ids, HEAD_DIM, 10000.0)
        x = self.embedding(batch["input_ids"])
        for block in self.blocks:
            x = block(x, rope, lambda q, k, v: attend(q, k, v, batch.layout))
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits, batch["labels"], reduction="sum")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", help="a plan file; else one is made for two fast and two slow")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    plan = options.plan or hx.plan(CLUSTER, "tiny", seq_len=512, global_batch=2)
    with hx.init(plan) as context:
        attend = hx.HexiSeqAttention(context, causal=True)
        torch.manual_seed(0)  # every rank begins with the same weights
        model = Llama().to(context.device)
        for block in model.blocks:
            fully_shard(block, mesh=context.mesh)
        fully_shard(model, mesh=context.mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        if options.compile:
            model.compile()
            if len(context.replica_ranks) > 1:
                attend = torch.compiler.disable(attend)
        corpus = Corpus()
        for step in range(options.steps):
            indices = sequences_of(context.plan, context.replica, step, turn=0)
            tokens, cu_seqlens = corpus.sequences(indices, context.plan.seq_len)
            batch = context.shard({"input_ids": tokens, "labels": tokens}, cu_seqlens=cu_seqlens)
            num_tokens = (batch["labels"] >= 0).sum()
            # FSDP2 averages gradients over its mesh; token_mean makes that the mean over tokens
            loss = context.token_mean(
                model(batch, attend), num_tokens, grad_average=context.mesh.size()
            )
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if context.rank == 0:
                print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)
        if options.compile and context.rank == 0:
            stops = torch._dynamo.utils.counters["graph_break"]
            for reason, count in stops.items():
                print(f"{count} graph breaks: {reason.splitlines()[0]}")
            print(f"{sum(stops.values())} graph breaks in all")


if __name__ == "__main__":
    main()
