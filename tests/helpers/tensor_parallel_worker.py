"""One of several processes with torchrun's variables: ``python tensor_parallel_worker.py FOLDER ...``.

Each folder holds a model; the first process writes its logits, and a generated text, to FOLDER/outputs.pt.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import diff_transformer  # noqa: F401


def outputs(model) -> dict[str, torch.Tensor]:
    ids = torch.arange(24).view(2, 12) * 5 % 200
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # left padding
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask).logits
        tokens = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None
        )
    return {"logits": logits, "tokens": tokens}


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
        found = outputs(model)
        found["share"] = torch.tensor(model.model.layers[0].self_attn.q_proj.weight.to_local().shape[0])
        if torch.distributed.get_rank() == 0:
            torch.save(found, folder / "outputs.pt")
    torch.distributed.destroy_process_group()
