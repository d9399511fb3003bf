"""The training state as plain tensors and values, and a copy of it in memory to be written while training goes on."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Snapshots:
    """Copies states of one shape again and again into the same buffers (pinned where they come from a GPU)."""

    def __init__(self):
        self._buffers: dict[tuple, Tensor] = {}

    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """``plain_state(state)`` with every tensor copied to main memory; the next ``take`` overwrites the copies.

        Tensors that share memory (tied weights) share their copy.
        """
        copied: dict[tuple, Tensor] = {}
        taken = self._copy(plain_state(state), (), copied)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return taken

    def _copy(self, value: Any, place: tuple, copied: dict[tuple, Tensor]) -> Any:
        if isinstance(value, dict):
            return {key: self._copy(item, (*place, key), copied) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(item, (*place, i), copied) for i, item in enumerate(value))
        if not isinstance(value, Tensor):
            return value
        memory = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() == 0 or memory not in copied:
            buffer = self._buffers.get(place)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
                self._buffers[place] = buffer
            copied[memory] = buffer.copy_(value.detach(), non_blocking=True)
        return copied[memory]


def plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` with modules, optimizers and the like as their ``state_dict``, free of Fabric's and torch.compile's
    wrapping, so that it loads into either form."""
    return {key: _plain(value) for key, value in state.items()}


def has_shards(state: dict[str, Any]) -> bool:
    """Whether some tensor of the state is a DTensor, of which this process may hold a part alone."""
    return any(isinstance(tensor, DTensor) for tensor in _tensors(state))


def state_bytes(state: dict[str, Any]) -> int:
    """Bytes of all tensors of a state, each memory once; of a sharded tensor, of all its shards together."""
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
