"""Loads exported models where this package cannot be imported; run as a script: FOLDER..., each with inputs.pt.

Writes beside each ``outputs.pt``: logits, greedy tokens, and tokens over a static cache.
"""

import sys
from importlib.abc import MetaPathFinder

import torch


class Absent(MetaPathFinder):
    """Hide the package, as if it were not installed."""

    def find_spec(self, fullname, path, target=None):
        if fullname.split(".")[0] == "diff_transformer":
            raise ModuleNotFoundError(f"No module named {fullname!r}")


def main(folders: list[str]):
    torch.set_num_threads(1)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, use_safetensors=True).eval()
        assert model.is_remote_code(), type(model)
        ids = torch.tensor(AutoTokenizer.from_pretrained(folder)("some text, and more")["input_ids"])[None]
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with torch.no_grad():
            outputs = {"logits": model(ids).logits, "tokens": model.generate(ids, **options)}
        outputs["static"] = model.generate(ids, cache_implementation="static", disable_compile=True, **options)
        model.train()(ids, labels=ids).loss.backward()
        outputs["gradient"] = next(iter(model.parameters())).grad.clone()
        torch.save(outputs, f"{folder}/outputs.pt")
    assert "diff_transformer" not in sys.modules


if __name__ == "__main__":
    sys.meta_path.insert(0, Absent())
    main(sys.argv[1:])
