"""One training step, the optimizer and its schedule, and the validation loss, on the processes that Fabric has."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn

from diff_transformer.data.mixture import IGNORED
from diff_transformer.model.lambdas import LAMBDAS
from diff_transformer.train.config import OptimConfig, RunConfig
from diff_transformer.train.context_parallel import WHOLE
from diff_transformer.train.loss import count_by_source, mostly, predicted, token_weights
from diff_transformer.train.parallelize import batch_part, reshard, sum_over_replicas
from diff_transformer.train.telemetry import full_tensor, gradient_norms
from diff_transformer.train.training_data import Rows, model_inputs, without_first_tokens

VALIDATION_ROWS = 16  # rows of a forward pass, at most
_PRIME = 1_000_003


@dataclass(frozen=True)
class Outcome:
    """The result of a step, over all processes."""

    loss: float  # of the whole batch
    norm: float  # of the gradient, before clipping
    stop: bool  # whether any process was asked to stop
    norms: dict[str, float]  # of the gradient by part of the model, if asked for
    nats: list[float]  # sum over the predicted tokens of each source
    tokens: list[float]  # number of predicted tokens of each source

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class Stepper:
    """Forward, backward, clipping and update of one model, on this process's share of each batch.

    Args:
        model, optimizer: as Fabric has set them up; ``model`` wraps an ``Objective``.
        unwrapped_model: the model itself.
        eos_id: id of the token that ends a document.
        context: this process's part of each row.
    """

    def __init__(
        self, fabric, model, optimizer, unwrapped_model: nn.Module, config: RunConfig, eos_id: int, context=WHOLE
    ):
        self.fabric, self.model, self.optimizer, self.unwrapped_model = fabric, model, optimizer, unwrapped_model
        self.config, self.eos_id, self.context = config, eos_id, context
        self.batch_part = batch_part(fabric, context.size)
        # FSDP2 reduces gradients in every pass: whole gradients, kept until the last pass, would not fit in memory.
        self.sharded = isinstance(fabric.strategy, ModelParallelStrategy)

    def step(self, rows: Rows, step: int, rate: float, stop: Callable[[], bool], *, by_part: bool = False) -> Outcome:
        """Update the model once. Random draws, such as those of dropout, are a function of seed, step and rows.

        Args:
            step: from 0.
            rate: learning rate.
            stop: whether this process was asked to stop.
            by_part: also measure the gradient norm of each part of the model.
        """
        fabric, config = self.fabric, self.config
        torch.manual_seed(((config.train.seed * _PRIME + step) * _PRIME + self.batch_part.rank) % 2**63)
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        shares, micro_batch = [*config.data.shares.values()], config.train.rows_of_a_pass(self.batch_part.size)
        dense = mostly(predicted(rows.labels))  # of rows that the host still has
        ids, labels, source = fabric.to_device(rows)
        counts = self._sum(count_by_source(labels, source, len(shares)), self.batch_part.size)
        weights = token_weights(labels, source, counts, shares, config.data.loss)
        total, nats = torch.zeros((), device=fabric.device), torch.zeros_like(counts)
        passes = list(zip(*(tensor.split(micro_batch) for tensor in (ids, labels, weights, source)), strict=True))
        parts = self.batch_part.size * self.context.size  # of the batch
        for i, (*inputs, row_source) in enumerate(passes):
            if config.train.parallel.replicas > 1:
                sum_over_replicas(self.model, i == len(passes) - 1)
            with fabric.no_backward_sync(self.model, enabled=i < len(passes) - 1 and not self.sharded):
                loss, row_nats = self.model(*self._part(*inputs), dense)
                fabric.backward(loss * parts)  # DDP and FSDP2 average over processes; this loss is a sum
            total += loss.detach()
            nats.index_add_(0, row_source, row_nats.to(nats))
        limit = config.optim.grad_clip or float("inf")
        norm = fabric.clip_gradients(self.model, self.optimizer, max_norm=limit, error_if_nonfinite=False)
        norms = gradient_norms(self.unwrapped_model, norm) if by_part else {}
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        asked = torch.tensor(float(stop()), device=fabric.device)
        summed = self._sum(torch.cat((torch.stack((total, asked)), nats)), parts)
        # One read, the only one of a step: the host waits for the device here.
        norm, total, stops, *by_source = torch.cat((full_tensor(norm).to(summed)[None], summed, counts)).tolist()
        return Outcome(total, norm, stops > 0, norms, by_source[: len(shares)], by_source[len(shares) :])

    @torch.no_grad()
    def validation_loss(self, held_out: Tensor, labels: Tensor | None = None) -> float:
        """Mean negative log-likelihood, nats a token, on rows int64 [n, T], which the processes share.

        Args:
            labels: int64 [n, T], -100 for a token that does not count; the rows themselves by default.
        """
        self.model.eval()
        labels = held_out if labels is None else labels
        if self.config.data.documents == "separate":
            labels = torch.from_numpy(without_first_tokens(labels.numpy(), held_out.numpy(), self.eos_id))
        # Repeated rows, with weight 0, give all processes equal numbers of rows.
        padding = torch.arange(-len(held_out) % self.batch_part.size) % len(held_out)
        ids, labels = (self.batch_part.of(torch.cat((tensor, tensor[padding]))) for tensor in (held_out, labels))
        weights = predicted(labels).float()
        dense = mostly(weights > 0)
        weights[max(0, len(held_out) - self.batch_part.rank * len(ids)) :] = 0
        sums = []  # nats and tokens of each pass, which are read once: the device need not wait for the host
        micro_batch = min(VALIDATION_ROWS, self.config.train.micro_batch_size or VALIDATION_ROWS)
        for part in zip(*(tensor.split(micro_batch) for tensor in (ids, labels, weights)), strict=True):
            inputs, targets, weights_of_part = self._part(*self.fabric.to_device(part))
            nats, _ = self.model(inputs, targets, weights_of_part, dense)
            sums.append(torch.stack((nats, weights_of_part.sum().to(nats))))
        reshard(self.model)
        parts = self.batch_part.size * self.context.size
        total = torch.tensor([sum(column) for column in zip(*torch.stack(sums).tolist(), strict=True)])
        nats, tokens = self._sum(total.to(self.fabric.device), parts).tolist()
        return nats / tokens

    @torch.no_grad()
    def answer_accuracy(self, held_out: Tensor, labels: Tensor) -> float:
        """Share of the answers that the model predicts whole, for a model that one process has whole.

        Args:
            held_out, labels: int64 [n, T]. An answer is a run of labels; -100 stands elsewhere.
        """
        model: Any = self.unwrapped_model.eval()
        right = []
        for part in zip(held_out.split(VALIDATION_ROWS), labels.split(VALIDATION_ROWS), strict=True):
            ids, wanted = self.fabric.to_device(part)
            targets = F.pad(wanted[:, 1:], (0, 1), value=IGNORED)  # what each token predicts
            asked = targets != IGNORED
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[asked]  # [tokens, D]
            missed = model.get_output_embeddings()(hidden).argmax(-1) != targets[asked]
            starts = (asked & ~asked.roll(1, dims=1))[asked]  # the last token of a row predicts nothing
            answer = starts.cumsum(0) - 1  # which answer a token belongs to
            misses = torch.zeros(int(starts.sum()), device=ids.device).index_add_(0, answer, missed.float())
            right.append(misses == 0)
        return torch.cat(right).float().mean().item()

    def _part(self, ids: Tensor, labels: Tensor, weights: Tensor) -> tuple[dict, Tensor, Tensor]:
        """Inputs of the model, targets and weights: what this process has of rows ``ids``, ``labels [B, T]``."""
        return self.context.cut(model_inputs(ids, self.config.data.documents, self.eos_id), labels[:, 1:], weights)

    def _sum(self, numbers: Tensor, parts: int) -> Tensor:
        """Sum over the processes, of which each ``parts`` counted different things, and the others the same again."""
        if self.fabric.world_size > 1:
            dist.all_reduce(numbers)
            numbers *= parts / self.fabric.world_size
        return numbers


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: never on lambda (V2's projection included), norms or other vectors.

    Source: section 3.1, appendices C and D.
    """
    lambdas = {id(p) for module in model.modules() if isinstance(module, LAMBDAS) for p in module.parameters()}
    decayed, others = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decayed if parameter.ndim >= 2 and id(parameter) not in lambdas else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The rate of step ``step`` (from 0) of ``steps``: linear warm-up, then linear decay to ``final_lr_ratio * lr``."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    rest = max(1, steps - config.warmup_steps)
    done = min(1.0, (step + 1 - config.warmup_steps) / rest)
    return config.lr * (1.0 - (1.0 - config.final_lr_ratio) * done)
