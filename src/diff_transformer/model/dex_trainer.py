"""DEX with the Trainer of transformers; apart, as importing that takes a second."""

from typing import Any

from transformers import TrainerCallback

from diff_transformer.model.dex import set_progress


class DexCallback(TrainerCallback):
    """Lambda's schedule for the Trainer of transformers: ``Trainer(..., callbacks=[DexCallback()])``."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        set_progress(model, (state.global_step + 1) / state.max_steps)
