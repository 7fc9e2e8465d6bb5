"""Hugging Face's Trainer, and those made of it such as TRL's SFTTrainer, under an uneven plan.

    class PlannedSFTTrainer(PlannedTrainerMixin, SFTTrainer): ...

    with hx.init("plan.json") as context:
        trainer = PlannedSFTTrainer(model, args=args, train_dataset=texts, context=context)
        trainer.train()

All ranks of a replica read the same rows of the data set and replicas different ones; each batch is
cut by `hf.shard` before the model sees it, and its loss is the mean over all tokens of the whole
step, whatever replica and pass they are in. Everything else stays the Trainer's: accumulation,
clipping, evaluation, saving and resuming, DDP or FSDP2 through accelerate, whose mesh is all ranks.
Only public methods of the Trainer are overridden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from hexiseq_triton.context import ParallelContext
from hexiseq_triton.errors import InputError
from hexiseq_triton.integrations import hf
from hexiseq_triton.integrations.replica_rows import EvaluationLoader, ReplicaRows, shuffled

if TYPE_CHECKING:
    _Next = Any  # the Trainer that stands after the mixin
else:
    _Next = object

_LOSSES = {("transformers", "Trainer"), ("trl", "SFTTrainer")}
"""Whose `compute_loss` is the cross entropy of the next token, which the mixin computes instead."""
_WRAPPERS = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")
"""What accelerate may do with the model, in its own words."""


class PlannedTrainerMixin(_Next):  # type: ignore[misc]
    """Makes a Trainer train under a plan; name it before the Trainer among the bases.

    A replica's batch is `per_device_train_batch_size` rows for each of the plan's sequences of that
    replica. Accumulation is the TrainingArguments'. Evaluation reports the loss alone, as the mean
    over all labels of the data set.

    Args:
        context: the live plan; all its ranks run the same Trainer.
        arguments: the Trainer's own.

    Raises:
        InputError: the same on all ranks, if the Trainer is asked on any of them for a loss or a
            wrapper that this cannot do.
    """

    def __init__(self, *arguments: Any, context: ParallelContext, **named: Any) -> None:
        hf.register()
        self.context = context
        with context.guard():
            super().__init__(*arguments, **named)
            _refuse_together(context, _unsupported(self))
        self.model.set_attn_implementation(hf.NAME)
        # the loss is the mean over the whole step already
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self._evaluated = (0.0, 0)  # loss sum, label tokens

    def call_model_init(self, trial: Any = None) -> Any:
        """Return a fresh model, which `train` asks for too where it was given a `model_init`."""
        model = super().call_model_init(trial)
        model.set_attn_implementation(hf.NAME)
        return model

    # ---------------------------------------------------------------- who reads which rows

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the rows of one step, of all replicas and passes."""
        return sum(self._rows_of_replicas(args.train_batch_size)) * int(
            args.gradient_accumulation_steps
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of this replica's rows, in an order that the seed and epoch decide."""
        loader = super().get_train_dataloader()
        rows = self._rows(loader, self.args.train_batch_size)
        strategy = getattr(self.args, "train_sampling_strategy", "random")
        by_length = getattr(self.args, "group_by_length", False)  # its older name
        if by_length or strategy not in ("random", "sequential"):
            self._refuse("rows are grouped by length; use their random or sequential order")
        if strategy == "random":
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            rows.order = lambda: shuffled(rows.num_rows, seed, self._epoch(len(rows)))
        rows.ending = "drop" if self.args.dataloader_drop_last else "repeat"
        return DataLoader(batch_sampler=rows, **_loader_options(loader))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the loader of this replica's rows for evaluation, each row once."""
        loader = super().get_eval_dataloader(eval_dataset)
        rows = self._rows(loader, self.args.eval_batch_size)
        return EvaluationLoader(batch_sampler=rows, **_loader_options(loader))

    def _rows(self, loader: DataLoader[Any], rows_a_sequence: int) -> ReplicaRows:
        dataset: Any = loader.dataset
        if isinstance(dataset, IterableDataset):
            self._refuse(
                "the data set is a stream without length; replicas need to pick their rows: use a "
                "data set with a length"
            )
        replica = self.context.replica or 0  # an idle rank reads along and keeps no token
        return ReplicaRows(len(dataset), self._rows_of_replicas(rows_a_sequence), replica)

    def _rows_of_replicas(self, rows_a_sequence: int) -> list[int]:
        return [each.sequences * rows_a_sequence for each in self.context.plan.replicas]

    def _epoch(self, passes_an_epoch: int) -> int:
        """Return the epoch by the steps done, as the Trainer counts it after a resumption too."""
        steps_an_epoch = -(-passes_an_epoch // self.args.gradient_accumulation_steps)
        return int(self.state.global_step // max(steps_an_epoch, 1))

    # ---------------------------------------------------------------- what a step trains on

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], int]:
        """Return this rank's tokens of a step's passes, and how many of them have a label."""
        with self.context.guard():
            whole = list(islice(epoch_iterator, num_batches))
        shards = self._shards(whole)
        return [batch.inputs for batch in shards], sum(b.num_label_tokens for b in shards)

    def _shards(self, batches: list[Mapping[str, Any]]) -> list[hf.HFBatch]:
        """Return this rank's tokens of batches; what one replica's lack all ranks hear of.

        Else the other replicas would wait for it in their wrapper, which knows no reason.
        """
        shards, problem = [], ""
        try:
            shards = [hf.shard(self.context, batch) for batch in batches]
        except InputError as error:
            problem = str(error)
        if len(self.context.replica_ranks) == self.context.plan.world_size:
            found = [problem] if problem else []
        else:
            found = list(dict.fromkeys(filter(None, self.context.gather("batch", problem))))
        if found:
            raise InputError("\n".join(found))
        return shards

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: int | None = None,
    ) -> Any:
        """Return one pass's part of the step's mean cross entropy; a collective call."""
        outputs = model(**inputs)
        batch: hf.HFBatch = inputs[hf.NAME]
        loss = batch.token_mean(
            outputs.logits,
            grad_average=self.accelerator.num_processes,
            num_tokens=num_items_in_batch,
        )
        return (loss, outputs) if return_outputs else loss

    # ---------------------------------------------------------------- evaluation

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        """Return the mean loss of one batch of all replicas, and no logits."""
        (batch,) = self._shards([inputs])
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, batch.inputs)
        labels = torch.tensor([batch.num_label_tokens], device=self.context.device)
        count = int(self.accelerator.gather(labels).sum())
        loss_sum, tokens = self._evaluated
        self._evaluated = (loss_sum + float(loss) * count, tokens + count)
        return loss, None, None

    def evaluation_loop(
        self, *arguments: Any, metric_key_prefix: str = "eval", **named: Any
    ) -> Any:
        """Evaluate; the loss is the mean over all labels, however they fall into batches."""
        self._evaluated = (0.0, 0)
        output = super().evaluation_loop(*arguments, metric_key_prefix=metric_key_prefix, **named)
        loss_sum, tokens = self._evaluated
        if tokens:
            output.metrics[f"{metric_key_prefix}_loss"] = loss_sum / tokens
        return output

    def predict(self, *_: Any, **__: Any) -> Any:
        """Refuse: logits stay on their ranks.

        Raises:
            InputError: always.
        """
        self._refuse(
            "predict would gather all logits; call model(**batch.inputs), then context.unshard"
        )

    def _refuse(self, problem: str) -> NoReturn:
        """Raise, and let the other ranks know why."""
        with self.context.guard():
            raise InputError(problem)


class PlannedTrainer(PlannedTrainerMixin, Trainer):  # type: ignore[misc]
    """transformers' Trainer under a plan."""


def _refuse_together(context: ParallelContext, problem: str | None) -> None:
    """Raise the same error on all ranks if one of them has a problem."""
    answers = context.gather("trainer", problem or "")
    found = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]
    if found:
        raise InputError("\n".join(found))


def _loader_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what a loader of the same data set takes, the choice of rows left out."""
    names = ["dataset", "collate_fn", "num_workers", "pin_memory", "worker_init_fn"]
    if loader.num_workers:
        names += ["prefetch_factor", "persistent_workers", "multiprocessing_context"]
    return {name: getattr(loader, name) for name in names}


def _loss_owner(trainer_class: type) -> type:
    """Return the class whose `compute_loss` the mixin stands before."""
    classes = trainer_class.__mro__
    after = classes[classes.index(PlannedTrainerMixin) + 1 :]
    return next(each for each in after if "compute_loss" in vars(each))


def _unsupported(trainer: Any) -> str | None:
    """Say what the Trainer is asked for that would be dropped or computed wrongly."""
    args, accelerator = trainer.args, trainer.accelerator
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    loss_type = getattr(args, "loss_type", "nll")
    owner = _loss_owner(type(trainer))
    if (owner.__module__.split(".")[0], owner.__name__) not in _LOSSES:
        return (
            f"{owner.__name__} computes its own loss; only plain cross entropy works: derive from "
            "transformers' Trainer or TRL's SFTTrainer"
        )
    if trainer.compute_loss_func is not None or args.label_smoothing_factor:
        return "only plain cross entropy works; drop compute_loss_func and label_smoothing_factor"
    if loss_type not in ("nll", "chunked_nll"):
        return f"loss_type is {loss_type!r}; only 'nll' works"
    task = getattr(trainer.model, "loss_type", None)
    if task not in (None, "ForCausalLM", "ForConditionalGeneration"):
        return (
            f"{type(trainer.model).__name__} has the loss of {task}; only that of ForCausalLM, the "
            "next token, works"
        )
    if getattr(trainer.model.config, "output_router_logits", False):
        return (
            "the router's auxiliary loss does not work; set output_router_logits to False, or "
            "router_aux_loss_coef to 0.0 in TRL's SFTConfig"
        )
    if getattr(args, "neftune_noise_alpha", None):
        return (
            "neftune_noise_alpha is set; its noise depends on how many tokens a rank holds: leave "
            "it out"
        )
    if getattr(args, "predict_with_generate", False):
        return "predict_with_generate does not work, only the loss is evaluated: leave it out"
    if trainer.compute_metrics is not None:
        return "compute_metrics needs logits, which stay on their ranks; only the loss is evaluated"
    if getattr(accelerator, "parallelism_config", None) is not None:
        return "parallelism_config is given; the plan says what is parallel: leave it out"
    wrapper = accelerator.distributed_type.value
    if wrapper not in _WRAPPERS or args.n_gpu > 1:
        return f"accelerate chose {wrapper} with {args.n_gpu} GPUs a process; use DDP or FSDP2"
    if plugin is not None and plugin.fsdp_version != 2:
        return "FSDP version 1 is chosen; set fsdp_config={'version': 2}"
    if accelerator.num_processes != trainer.context.plan.world_size:
        return (
            f"accelerate sees {accelerator.num_processes} processes, the plan "
            f"{trainer.context.plan.world_size}; start this with torchrun"
        )
    return None
