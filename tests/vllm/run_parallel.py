"""Greedy answers of an engine of several processes; run as a script: FOLDER JSON, which names its options and rows.

Writes the answers and what each process holds to ``answers.json`` in the current folder.
"""

import json
import sys
from pathlib import Path


def shares(worker) -> list[int]:
    """What this process has: layers, outputs of their query, key and value projections, inputs of W_O."""
    layers = [layer.self_attn for layer in worker.model_runner.model.model.layers if hasattr(layer, "self_attn")]
    qkv, out = layers[0].qkv_proj, layers[0].o_proj
    return [len(layers), qkv.output_size_per_partition, out.input_size_per_partition]


def main(folder: str, request: dict):
    from engine_models import answers
    from vllm import LLM

    engine = LLM(
        folder, dtype="float32", enforce_eager=True, max_model_len=256, block_size=32,
        distributed_executor_backend="mp", **request["options"],
    )  # fmt: skip
    found = {
        "answers": answers(engine, request["rows"]) if request["rows"] else [],
        "shares": engine.collective_rpc(shares),
    }
    Path("answers.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
