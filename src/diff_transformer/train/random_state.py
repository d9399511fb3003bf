"""The state of every random generator that training may draw from, in types that load without executing code."""

import random
from typing import Any, cast

import numpy as np
import torch


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
    """Put back what ``random_state`` gave; CUDA devices that are not there now are left out."""
    torch.set_rng_state(state["torch"].cpu())
    for device, words in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(words.cpu(), device)
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.cpu().numpy().astype(np.uint32), *rest))
    version, words, following = state["python"]
    random.setstate((version, tuple(words.tolist()), following))
