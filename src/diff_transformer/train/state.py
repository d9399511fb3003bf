"""The training state in a form that depends on no number of processes: whole tensors under the parameters' names."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from diff_transformer.train.random_state import random_state, set_random_state


class NamedOptimizer:
    """An optimizer's state under the names of its model's parameters; whole on rank 0, where parameters are sharded.

    ``state_dict`` and ``load_state_dict`` are called by every process. The state loads into the same optimizer over any
    number of processes.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=_whole(self.model))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=state, options=options)


class TrainingState:
    """What a checkpoint holds of a run: model, optimizer, finished steps, random state of every process.

    Args:
        sharded_files: where the model is sharded, every process writes its part to a file of its own instead of
            sending it to rank 0; such a checkpoint loads over any number of processes, but under FSDP2 alone.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded_files: bool = False):
        self.model, self.optimizer = model, optimizer
        self.in_parts = sharded_files and is_sharded(model)

    def to_load(self) -> dict[str, Any]:
        """A state for ``load_checkpoint`` to load into."""
        optimizer = self.optimizer if self.in_parts else NamedOptimizer(self.model, self.optimizer)
        return {"model": self.model, "optimizer": optimizer, "step": 0, "random": []}

    def take(self, loaded: dict[str, Any], seed: int) -> int:
        """The number of finished steps of a loaded state, whose random state this process takes on."""
        _take_random_state(loaded["random"], seed, loaded["step"])
        return loaded["step"]

    def to_save(self, step: int) -> dict[str, Any]:
        """The state after ``step`` steps, for ``save_checkpoint``; called by every process."""
        rest = {"step": step, "random": _random_states()}
        if self.in_parts:
            return {"model": self.model, "optimizer": self.optimizer, **rest}
        optimizer = NamedOptimizer(self.model, self.optimizer).state_dict()
        return {"model": whole_weights(self.model), "optimizer": optimizer, **rest}


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model with whole tensors: of a sharded one on the CPU of rank 0, and {} on other ranks."""
    return get_model_state_dict(model, options=_whole(model))


def whole_model(model: Any, first: bool) -> Any:
    """The finished model in eval mode, ready for generation: ``model`` itself, or of a sharded one a whole copy on the
    process that is ``first``, None on the others. Called by every process."""
    if is_sharded(model):
        weights = whole_weights(model)
        if not first:
            return None
        dtype = model.dtype
        model = type(model)(model.config)
        model.to(dtype).load_state_dict(weights)
    model.config.use_cache = True
    return model.eval()


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


@torch.no_grad()
def present_lambdas(model: nn.Module) -> list[float]:
    """What telemetry shows of lambda in each layer of a model that is spread over processes, all of which call it. A
    lambda that depends on the token is averaged over what they computed last."""
    from diff_transformer.model.lambdas import LAMBDAS, LearnedLambda, TokenLambda, present_lambda

    values = []
    for module in model.modules():
        if isinstance(module, LearnedLambda):
            parameters = {name: _whole_tensor(p) for name, p in module.named_parameters()}
            with torch.device("meta"):
                copy = LearnedLambda(len(parameters["lambda_q1"]), module.initial, module.std)
            copy.load_state_dict(parameters, assign=True)
            values.append(present_lambda(copy))
        elif isinstance(module, TokenLambda):
            mean = module.mean.clone()
            dist.all_reduce(mean)
            values.append(mean.item() / dist.get_world_size())
        elif isinstance(module, LAMBDAS):
            values.append(present_lambda(module))
    return values


def _whole(model: nn.Module) -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, cpu_offload=is_sharded(model))


def _whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _random_states() -> list[dict[str, Any]]:
    """The state of the random generators of every process, by rank."""
    if not dist.is_initialized():
        return [random_state()]
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, random_state())
    return states


def _take_random_state(states: list[dict[str, Any]], seed: int, step: int) -> None:
    """Put back this process's random state; one that had no process then starts from (seed, step, rank)."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank < len(states):
        set_random_state(states[rank])
    elif states:
        torch.manual_seed(hash((seed, step, rank)))
