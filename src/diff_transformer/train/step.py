"""One step of training and one look at the held-out rows, on whatever processes Fabric has."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn

from diff_transformer.train.config import RunConfig
from diff_transformer.train.materials import Materials, mixture_shares, model_inputs, without_first_tokens
from diff_transformer.train.parallelize import Share, reshard, share_of
from diff_transformer.train.telemetry import full, gradient_norms
from diff_transformer.train.weighting import count_by_source, predicted, token_weights

VALIDATION_ROWS = 16  # most in a forward pass


class Rows(NamedTuple):
    """This process's rows of a batch. ``source``: index of each row's source in the mixture."""

    ids: Tensor  # int64 [b, T]
    labels: Tensor  # int64 [b, T], -100 for none
    source: Tensor  # int64 [b]


@dataclass(frozen=True)
class Outcome:
    """Of a step: the loss of the whole batch; the gradient norm before clipping, and by part where asked for; whether
    any process was asked to stop; sum of nats and number of predicted tokens of each source."""

    loss: float
    norm: float
    stop: bool
    norms: dict[str, float]
    nats: list[float]
    tokens: list[float]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


def make_rows(materials: Materials, config: RunConfig, share: Share, step: int) -> Rows:
    """This process's part of the batch of ``step``: a pure function of its arguments."""
    batch, end = materials.mixture.batch(step, share.rank, share.size), materials.tokenizer.eos_token_id
    if config.data.documents == "separate":
        batch["labels"] = without_first_tokens(batch["labels"], batch["input_ids"], end)
    rows = Rows(*(torch.from_numpy(batch[name]) for name in ("input_ids", "labels", "source")))
    return Rows(*(tensor.pin_memory() for tensor in rows)) if torch.cuda.is_available() else rows


class Stepper:
    """Forward, backward, clipping and update of one model on this process's share of each batch."""

    def __init__(self, fabric, model, optimizer, plain: nn.Module, config: RunConfig, end: int):
        self.fabric, self.model, self.optimizer, self.plain = fabric, model, optimizer, plain
        self.config, self.end, self.share = config, end, share_of(fabric)
        self.sharded = isinstance(fabric.strategy, ModelParallelStrategy)  # whole gradients would not fit: none wait

    def step(self, rows: Rows, rate: float, stop: Callable[[], bool], *, by_part: bool = False) -> Outcome:
        """One update at learning rate ``rate``. ``stop``: whether this process was asked to stop."""
        fabric, config = self.fabric, self.config
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        shares, at_once = list(mixture_shares(config).values()), config.train.rows_of_a_pass(self.share.size)
        ids, labels, source = fabric.to_device(rows)
        counts = self._add_up(count_by_source(labels, source, len(shares)))
        weights = token_weights(labels, source, counts, shares, config.data.loss)
        total, nats = torch.zeros((), device=fabric.device), torch.zeros_like(counts)
        parts = list(zip(*(tensor.split(at_once) for tensor in (ids, labels, weights, source)), strict=True))
        for i, (*part, of_part) in enumerate(parts):
            with fabric.no_backward_sync(self.model, enabled=i < len(parts) - 1 and not self.sharded):
                loss, of_rows = self._forward(*part)
                fabric.backward(loss * self.share.size)  # DDP and FSDP2 average over processes; ours is a sum
            total += loss.detach()
            nats.index_add_(0, of_part, of_rows.to(nats))
        limit = config.optim.grad_clip or float("inf")
        norm = fabric.clip_gradients(self.model, self.optimizer, max_norm=limit, error_if_nonfinite=False)
        norms = gradient_norms(self.plain, norm) if by_part else {}
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        asked = torch.tensor(float(stop()), device=fabric.device)
        total, stops, *nats = self._add_up(torch.cat((torch.stack((total, asked)), nats))).tolist()
        return Outcome(total, full(norm).item(), stops > 0, norms, nats, counts.tolist())

    @torch.no_grad()
    def validation_loss(self, held_out: Tensor) -> float:
        """Mean negative log-likelihood, nats a token, on rows [n, T], which the processes share."""
        self.model.eval()
        labels = held_out
        if self.config.data.documents == "separate":
            labels = torch.from_numpy(without_first_tokens(held_out.numpy(), held_out.numpy(), self.end))
        again = torch.arange(-len(held_out) % self.share.size) % len(held_out)  # to have as many rows on each process
        ids, labels = (self.share.of(torch.cat((tensor, tensor[again]))) for tensor in (held_out, labels))
        weights = predicted(labels).float()
        weights[max(0, len(held_out) - self.share.rank * len(ids)) :] = 0
        total = torch.zeros(2, dtype=torch.float64)  # nats, tokens
        at_once = min(VALIDATION_ROWS, self.config.train.micro_rows or VALIDATION_ROWS)
        for part in zip(*(tensor.split(at_once) for tensor in (ids, labels, weights)), strict=True):
            nats, _ = self._forward(*self.fabric.to_device(part))
            total += torch.tensor([nats.item(), part[-1].sum().item()])
        reshard(self.model)
        nats, tokens = self._add_up(total.to(self.fabric.device, torch.float32)).tolist()
        return nats / tokens

    def _forward(self, ids: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(model_inputs(ids, self.config.data.documents, self.end), labels, weights.view(torch.int32))

    def _add_up(self, numbers: Tensor) -> Tensor:
        """Sums over the processes that have rows of their own."""
        if self.fabric.world_size > 1:
            dist.all_reduce(numbers)
            numbers *= self.share.size / self.fabric.world_size  # tensor parallel processes have counted the same rows
        return numbers
