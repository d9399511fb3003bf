"""Generates with a compiled step over a static cache, in a process of its own: BACKEND CASE..., a case being
ATTENTION[,FIELD=VALUE...] with fields of the configuration.

Prints a line of JSON a case: graphs made in the warm-up, graph breaks, and whether tokens equal those of the uncompiled
model. A graph break is an error (fullgraph), and so is a recompilation after the warm-up.
"""

import json
import sys

import torch
from transformers import CompileConfig

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.inference.generation import left_padded
from diff_transformer.model.presets import preset


def run(backend: str, attention: str, **fields) -> dict:
    torch._dynamo.reset()
    torch._dynamo.config.error_on_recompile = False
    torch.manual_seed(0)
    config = preset(
        "debug", attention=attention, num_hidden_layers=1, embedding_initializer_range=1.0, num_key_value_heads=2,
        tie_word_embeddings=False, **fields,
    )  # fmt: skip
    model = DiffTransformerForCausalLM(config).eval()
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    compile_config = CompileConfig(fullgraph=True, mode="default", backend=backend)
    compile_config._compile_all_devices = True
    compiled = {**options, "cache_implementation": "static", "compile_config": compile_config}
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 512, (length,), generator=generator).tolist() for length in (9, 4, 6, 8)]
    ragged = [left_padded(pair, 0, "cpu") for pair in (rows[:2], rows[2:])]

    def same(ids, mask) -> bool:
        expected = model.generate(ids, attention_mask=mask, **options)
        return torch.equal(model.generate(ids, attention_mask=mask, **compiled), expected)

    counters = torch._dynamo.utils.counters
    counters.clear()
    all_same = same(*ragged[0])
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.config.error_on_recompile = True
    all_same &= all(same(*inputs) for inputs in (*ragged, ragged[0]))
    assert counters["stats"]["unique_graphs"] == graphs
    return {"graphs": graphs, "breaks": sum(counters["graph_break"].values()), "same": all_same}


def main(backend: str, *cases: str):
    torch.set_num_threads(1)
    for case in cases:
        attention, *assignments = case.split(",")
        fields = {name: int(value) for name, value in (assignment.split("=") for assignment in assignments)}
        print(json.dumps(run(backend, attention, **fields)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
