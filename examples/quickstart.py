import torch

import hexiseq_triton as hx

plan = hx.plan("examples/clusters/2-fast-2-slow.yaml", "tiny", seq_len=4096, global_batch=1)
with hx.init(plan) as context:  # binds the plan to the 4 running processes
    ids = torch.randint(256, (4096,), generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.tensor([0, 1000, 4096])  # two packed documents
    batch = context.shard({"input_ids": ids, "labels": ids}, cu_seqlens=cu_seqlens)
    tokens = batch.layout.num_tokens  # this rank's, uneven
    q, k, v = (torch.randn(tokens, heads, 16, device=context.device) for heads in (8, 4, 4))
    o = hx.HexiSeqAttention(context, causal=True)(q, k, v, batch.layout)
    print(f"rank {context.rank}: {tuple(o.shape)}, labels {tuple(batch['labels'].shape)}")
