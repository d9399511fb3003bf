"""The same random start for two models that are never in memory at once: draws are noted, and made again elsewhere."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_RANDOM = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


class _Notes(TorchDispatchMode):
    """Of each tensor that holds a draw as it was made: the generator's state before it, the operation, its arguments.

    A note ends when its memory is written to otherwise, or given to another tensor.
    """

    def __init__(self):
        super().__init__()
        self.last: dict[int, tuple[Tensor, Any, tuple, dict]] = {}

    def __torch_dispatch__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        drawn = func in _RANDOM
        if drawn:
            self.last[args[0].data_ptr()] = torch.get_rng_state(), func, args[1:], kwargs or {}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not drawn and not func.is_view:
            self.last.pop(result.data_ptr(), None)
        return result


class Start:
    """How the parameters of ``model()``, on the CPU, came to their values; the model itself is not kept.

    What is not drawn (the weights of norms, say) is kept as it is.
    """

    def __init__(self, model):
        with _Notes() as notes:
            made: nn.Module = model()
        self._values: dict[str, tuple[torch.Size, Tensor | tuple[Any, ...]]] = {}
        for name, parameter in made.named_parameters():
            drawn = notes.last.get(parameter.data_ptr())
            self._values[name] = parameter.shape, parameter.detach().clone() if drawn is None else drawn

    @torch.no_grad()
    def give(self, model: nn.Module) -> None:
        """Let each parameter of ``model`` that is here by name and shape have the same values, to the bit; the
        generator's state stays as it is."""
        before = torch.get_rng_state()
        for name, parameter in model.named_parameters():
            if name not in self._values or self._values[name][0] != parameter.shape:
                continue
            value = self._values[name][1]
            if isinstance(value, Tensor):
                parameter.copy_(value)
            else:
                state, draw, args, kwargs = value
                torch.set_rng_state(state)
                draw(parameter, *args, **kwargs)
        torch.set_rng_state(before)
