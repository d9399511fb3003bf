"""The training state that a checkpoint holds, in a form that does not depend on the number of processes.

Weights and optimizer state are whole tensors under the parameters' names, unless every process writes its own part
(``sharded_files``). Everything loads with ``weights_only=True``, without executing code.
"""

import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from diff_transformer.train.ranks import of_every_rank
from diff_transformer.train.weights import merged


class TrainingState:
    """The state of a run: model, optimizer, number of finished steps, random state of every process.

    Args:
        sharded_files: if the model is sharded, every process writes its part to a separate file instead of sending
            it to rank 0.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded_files: bool = False):
        self.model, self.optimizer = model, optimizer
        self.in_parts = sharded_files and is_sharded(model)

    def to_load(self) -> dict[str, Any]:
        """The state that ``load_checkpoint`` loads into."""
        optimizer = NamedOptimizer(self.model, self.optimizer)
        return {"model": self.model, "optimizer": optimizer, "step": 0, "random": []}

    def take(self, loaded: dict[str, Any], seed: int) -> int:
        """Restore this process's random state from a loaded state; return the number of finished steps."""
        _take_random_state(loaded["random"], seed, loaded["step"])
        return loaded["step"]

    def to_save(self, step: int) -> dict[str, Any]:
        """The state after ``step`` steps, for ``Saver.save``. Every process calls it."""
        rest = {"step": step, "random": of_every_rank(random_state())}
        if self.in_parts:
            optimizer = NamedOptimizer(self.model, self.optimizer).state_dict()
            return {"model": self.model.state_dict(), "optimizer": optimizer, **rest}
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=_whole(self.model))
        return {"model": whole_weights(self.model), "optimizer": optimizer, **rest}


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The model's state dict with whole tensors. For a sharded model: on the CPU of rank 0, and {} on other ranks."""
    return get_model_state_dict(model, options=_whole(model))


def whole_model(model: Any, first: bool) -> Any:
    """The finished model in eval mode, ready for generation. Every process calls it.

    For a sharded model: a whole copy on the process that is ``first``, None on the others.
    """
    if is_sharded(model):
        weights = whole_weights(model)
        if not first:
            return None
        dtype = model.dtype
        model = type(model)(model.config)
        model.to(dtype).load_state_dict(weights)
    for layer in getattr(model.base_model, "layers", ()):
        vars(layer).pop("forward", None)  # of training: each length and batch would be compiled again
    model.config.use_cache = True
    return merged(model).eval()


def is_sharded(model: nn.Module) -> bool:
    """True if some parameter is a DTensor."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


class NamedOptimizer:
    """An optimizer whose state is under the names of its model's parameters, and sharded as they are.

    Every process calls ``state_dict`` and ``load_state_dict``, which also takes a whole state.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        options = StateDictOptions(full_state_dict=not has_shards(state))
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=state, options=options)


def plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` with the ``state_dict`` of each module and optimizer, unwrapped from Fabric and ``torch.compile``."""
    return {key: _plain(value) for key, value in state.items()}


def has_shards(state: dict[str, Any]) -> bool:
    """True if some tensor of the state is a DTensor, so that this process may hold only a part of it."""
    return any(isinstance(tensor, DTensor) for tensor in _tensors(state))


def state_bytes(state: dict[str, Any]) -> int:
    """Bytes of all tensors of a state; shared memory counts once, a sharded tensor with all its shards."""
    sizes: dict[int, int] = {}
    for tensor in _tensors(state):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        sizes[local.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def _plain(value: Any) -> Any:
    from lightning.fabric import is_wrapped

    value = getattr(value, "_orig_mod", value)
    if is_wrapped(value):
        value = value.optimizer if isinstance(value, torch.optim.Optimizer) else value.module
    value = getattr(value, "_orig_mod", value)
    return value.state_dict() if hasattr(value, "state_dict") else value


def _tensors(value: Any) -> Iterator[Tensor]:
    value = _plain(value)
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def random_state() -> dict[str, Any]:
    """States of PyTorch (CPU and every CUDA device), NumPy's global generator and Python's ``random``."""
    kind, keys, position, has_gauss, gauss = cast(tuple, np.random.get_state())
    version, words, following = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, torch.tensor(words, dtype=torch.int64), following],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what ``random_state`` returned; CUDA devices that do not exist here are left out."""
    torch.set_rng_state(state["torch"].cpu())
    for device, words in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(words.cpu(), device)
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.cpu().numpy().astype(np.uint32), *rest))
    version, words, following = state["python"]
    random.setstate((version, tuple(words.tolist()), following))


def _whole(model: nn.Module) -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, cpu_offload=is_sharded(model))


def _take_random_state(states: list[dict[str, Any]], seed: int, step: int) -> None:
    """Restore this process's random state. A rank that did not exist then is seeded with (seed, step, rank)."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank < len(states):
        set_random_state(states[rank])
    elif states:
        torch.manual_seed(hash((seed, step, rank)))
