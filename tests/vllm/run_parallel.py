"""Engines of several processes, one after another; run as a script: a JSON list of folders, options and rows.

Writes to ``answers.json`` in the current folder, for each, what each of its processes holds, its greedy answers, and
with several pipeline stages, whose engine does not generate on a CPU, what the stages hand on; or its error.
"""

import json
import multiprocessing
import sys
import traceback
from pathlib import Path


def shares(worker) -> list[int]:
    """This process's part: layers, outputs of their query, key and value projections, inputs of W_O."""
    layers = [layer.self_attn for layer in worker.model_runner.model.model.layers if hasattr(layer, "self_attn")]
    qkv, out = layers[0].qkv_proj, layers[0].o_proj
    return [len(layers), qkv.output_size_per_partition, out.input_size_per_partition]


def stage(worker, row: list[int]) -> dict[str, list]:
    """Run this process's stage on ``row``: the first hands its hidden states to the last through vLLM's own group.

    vLLM's attention needs the engine's pages; PyTorch's stands in for it. Returns what the first hands on, or logits.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from vllm.distributed import get_pp_group
    from vllm.sequence import IntermediateTensors

    def attend(attention, q, k, v):
        q, k, v = (x.unflatten(-1, (-1, attention.head_size)).transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=attention.impl.scale, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    model, group = worker.model_runner.model, get_pp_group()
    for layer in model.model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.attn.forward = lambda q, k, v, attention=layer.self_attn.attn: attend(attention, q, k, v)
    ids, positions = torch.tensor(row), torch.arange(len(row))
    with torch.inference_mode():
        if group.is_first_rank:
            handed = model(ids, positions, None).tensors
            group.send_tensor_dict(handed)
            return {"handed": (handed["hidden_states"] + handed["residual"]).tolist()}
        received = IntermediateTensors(group.recv_tensor_dict())
        return {"logits": model.compute_logits(model(ids, positions, received)).tolist()}


def run(request: dict) -> dict:
    from engine_models import answers
    from vllm import LLM

    engine = LLM(
        request["folder"], dtype="float32", enforce_eager=True, max_model_len=256, block_size=32,
        distributed_executor_backend="mp", **request["options"],
    )  # fmt: skip
    try:
        found = {"shares": engine.collective_rpc(shares)}
        if "pipeline_parallel_size" in request["options"]:
            return found | {"stages": engine.collective_rpc(stage, args=(request["rows"][0],))}
        return found | {"answers": answers(engine, request["rows"])}
    finally:
        engine.llm_engine.engine_core.shutdown()


def main(requests: list[dict]):
    from vllm.v1.executor import multiproc_executor

    # vLLM's CPU build starts processes anew, each of which imports vLLM; with one thread they may be forked.
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    found = []
    for request in requests:
        try:
            found.append(run(request))
        except Exception:
            found.append({"error": traceback.format_exc()})
    Path("answers.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
