"""AdamW and its schedule (section 3.1, appendices C and D)."""

import torch
from torch import nn

from diff_transformer.train.config import OptimConfig


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: never on lambda (V2's projection included), norms or other vectors."""
    from diff_transformer.model.lambdas import LAMBDAS

    spared = {id(p) for module in model.modules() if isinstance(module, LAMBDAS) for p in module.parameters()}
    decayed, others = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decayed if parameter.ndim >= 2 and id(parameter) not in spared else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The rate of step ``step`` (from 0) of ``steps``: linear warm-up, then linear decay to ``final_lr_ratio * lr``."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    rest = max(1, steps - config.warmup_steps)
    done = min(1.0, (step + 1 - config.warmup_steps) / rest)
    return config.lr * (1.0 - (1.0 - config.final_lr_ratio) * done)


def schedule_warning(steps: int, config: OptimConfig) -> str | None:
    """What to tell whoever starts a run that ends within its warm-up; None for any other."""
    if steps > config.warmup_steps:
        return None
    last = learning_rate(steps - 1, steps, config)
    return (
        f"optim.warmup_steps {config.warmup_steps} is not less than train.steps {steps}: the learning rate ends at "
        f"{last:.3g} of {config.lr:.3g} and never decays; for more than a trial give fewer optim.warmup_steps"
    )
