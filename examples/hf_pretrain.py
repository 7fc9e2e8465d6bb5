"""Pretrain a small Llama with Hugging Face's Trainer under an uneven plan, from random weights.

    torchrun --nproc-per-node 4 examples/hf_pretrain.py [--plan plan.json] [--steps 20] [--resume]

Rows are packed documents of real text: the source files of Python's standard library, a byte a
token. Runs on GPUs, with FSDP2 and bf16, or on CPUs, where accelerate offers DDP alone.
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

import hexiseq_triton as hx
from hexiseq_triton.corpus import VOCAB, Corpus
from hexiseq_triton.integrations.hf_trainer import PlannedTrainer

CLUSTER = "examples/clusters/2-fast-2-slow.yaml"


class PackedRows(Dataset):
    """Consecutive rows of the corpus, each with the positions of its documents."""

    def __init__(self, corpus, num_rows, num_tokens):
        self.corpus, self.num_rows, self.num_tokens = corpus, num_rows, num_tokens

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        tokens, cu_seqlens = self.corpus.sequences(range(index, index + 1), self.num_tokens)
        positions = torch.cat([torch.arange(length) for length in cu_seqlens.diff().tolist()])
        return {"input_ids": tokens, "labels": tokens, "position_ids": positions}


def one_stream(rows):
    """Collate rows into one packed batch, [1, T]."""
    return {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", help="a plan file; else one is made for two fast and two slow")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="hf_pretrain_out")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args()
    plan = options.plan or hx.plan(CLUSTER, "tiny", seq_len=512, global_batch=2)
    with hx.init(plan) as context:
        on_gpu = context.device.type == "cuda"
        torch.manual_seed(0)  # every rank begins with the same weights
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=128, intermediate_size=344, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, head_dim=16,
        )  # fmt: skip
        arguments = TrainingArguments(
            options.out,
            max_steps=options.steps,
            per_device_train_batch_size=1,  # rows for each of the plan's sequences
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=2,
            learning_rate=2e-3,
            max_grad_norm=1.0,
            logging_steps=5,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=10,
            report_to=[],
            use_cpu=not on_gpu,
            bf16=on_gpu,
            fsdp=on_gpu,
            fsdp_config={"version": 2} if on_gpu else None,
        )
        corpus = Corpus()
        trainer = PlannedTrainer(
            AutoModelForCausalLM.from_config(config),
            args=arguments,
            data_collator=one_stream,
            train_dataset=PackedRows(corpus, 2000, context.plan.seq_len),
            eval_dataset=PackedRows(corpus, 5, context.plan.seq_len),
            context=context,
        )
        trainer.train(resume_from_checkpoint=options.resume or None)
        trainer.save_model()  # Hugging Face's format, for from_pretrained


if __name__ == "__main__":
    main()
