"""Lets ``backend="auto"`` time its forms of attention on a GPU before the first step of a run.

A compiled layer only reads verdicts, and ranks other than the first do not measure: both need them beforehand.
"""

import copy
import logging
from typing import Any

import torch

from diff_transformer.ops import api, choice
from diff_transformer.train.config import RunConfig
from diff_transformer.train.launch import on_first_rank
from diff_transformer.train.parallelize import share_of
from diff_transformer.train.step import VALIDATION_ROWS
from diff_transformer.train.training_data import TrainingData, make_rows, model_inputs

log = logging.getLogger("diff_transformer")


def measure_forms(fabric, config: RunConfig, model_config, data: TrainingData) -> None:
    """Time the forms for the attention of a pass and of a validation, on the first rank; all ranks take its choice.

    Does nothing where "auto" measures nothing (on a CPU, for softmax attention, for a named backend), and with tensor
    or context parallel, whose calls have other shapes.

    Args:
        model_config: of the run's model.
        data: of the run; the calls have the shapes of its first pass.
    """
    parallel = config.train.parallel
    if fabric.device.type not in api.MEASURED or max(parallel.tensor_parallel, parallel.context_parallel) > 1:
        return
    if model_config.attention == "softmax" or model_config.backend != "auto":
        return

    def measure() -> dict:
        try:
            _one_layer(fabric, config, model_config, data)
        except torch.OutOfMemoryError as error:
            log.warning("the forms of attention were not all timed before training: %s", error)
        return choice.choices(fabric.device)

    choice.adopt(on_first_rank(fabric, measure), fabric.device)


def _one_layer(fabric, config: RunConfig, model_config, data: TrainingData) -> None:
    """Forward and backward, and a forward alone, of a model with one layer and a vocabulary of one token."""
    from diff_transformer.model.modeling import DiffTransformerModel

    small = copy.deepcopy(model_config)
    small.num_hidden_layers, small.vocab_size, small.head_norm_init = 1, 1, 1.0
    gpus = [fabric.device] if fabric.device.type == "cuda" else []
    with torch.random.fork_rng(gpus), fabric.device:  # the run's own draws stay as they are
        model: Any = DiffTransformerModel(small)
    share = share_of(fabric)
    ids = make_rows(data, config, share, 0).ids[: config.train.rows_of_a_pass(share.size)]
    model = model.to(torch.float64 if config.train.precision == "64-true" else torch.float32)
    for rows, gradients in ((ids, True), (ids[:VALIDATION_ROWS], False)):
        inputs = model_inputs(rows.to(fabric.device), config.data.documents, data.tokenizer.eos_token_id)
        inputs["input_ids"] = torch.zeros_like(inputs["input_ids"])
        with torch.set_grad_enabled(gradients), fabric.autocast():
            out = model(**inputs, use_cache=False).last_hidden_state
        if gradients:
            out.sum().backward()
