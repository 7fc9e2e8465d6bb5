"""Fine-tune with TRL's SFTTrainer on packed examples under an uneven plan.

    torchrun --nproc-per-node 4 examples/hf_sft.py [--plan plan.json] [--model NAME] [--steps 20]

The task is real text at hand: the docstring of each function in forty modules of Python's standard
library, given the function's name and arguments. Without --model a tiny Llama with random weights
learns it, a byte a token. Runs on GPUs, with FSDP2 and bf16, or on CPUs, where accelerate offers
DDP alone.
"""

import argparse
import ast

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

import hexiseq_triton as hx
from hexiseq_triton.corpus import standard_library
from hexiseq_triton.integrations.hf_trainer import PlannedTrainerMixin

CLUSTER = "examples/clusters/2-fast-2-slow.yaml"
MODULES = 40


class PlannedSFTTrainer(PlannedTrainerMixin, SFTTrainer):
    """TRL's trainer under a plan."""


def docstrings():
    """Return prompts and completions from the first modules of the standard library."""
    found = []
    for path in sorted(standard_library().glob("*.py"))[:MODULES]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                prompt = f"def {node.name}({ast.unparse(node.args)}):\n"
                found.append({"prompt": prompt, "completion": text[:600]})
    return Dataset.from_list(found).train_test_split(test_size=20, seed=0)


def byte_tokenizer():
    """Return a tokenizer whose tokens are bytes."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<padding>"
    )


def model_and_tokenizer(name):
    """Load a model, or make a tiny one with random weights."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)  # every rank begins with the same weights
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=344, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=16,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config), tokenizer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", help="a plan file; else one is made for two fast and two slow")
    parser.add_argument("--model", help="a model's name or folder; it must fit the plan's heads")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="hf_sft_out")
    options = parser.parse_args()
    plan = options.plan or hx.plan(CLUSTER, "tiny", seq_len=512, global_batch=2)
    with hx.init(plan) as context:
        on_gpu = context.device.type == "cuda"
        model, tokenizer = model_and_tokenizer(options.model)
        data = docstrings()
        arguments = SFTConfig(
            options.out,
            packing=True,
            max_length=context.plan.seq_len,  # a row of packed examples is a sequence of the plan
            max_steps=options.steps,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            learning_rate=2e-3,
            max_grad_norm=1.0,
            logging_steps=5,
            eval_strategy="steps",
            eval_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=not on_gpu,
            bf16=on_gpu,
            fsdp=on_gpu,
            fsdp_config={"version": 2} if on_gpu else None,
        )
        trainer = PlannedSFTTrainer(
            model,
            args=arguments,
            train_dataset=data["train"],
            eval_dataset=data["test"],
            processing_class=tokenizer,
            context=context,
        )
        trainer.train()
        trainer.save_model()  # Hugging Face's format, for from_pretrained


if __name__ == "__main__":
    main()
