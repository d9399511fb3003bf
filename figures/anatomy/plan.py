"""Do the three explanations of differential attention hold inside small models? Two groups of models answer.

``stages``: the demo's Transformer, DIFF, V2 and the Transformer + head norm, five seeds, measured by ``eval anatomy``.
As a script it measures the finished recall models of the study gate_norm_subtraction on rows of their own task.

Commands: ``diff-transformer study anatomy --out runs/anatomy``; ``python figures/anatomy/plan.py runs/gate
runs/anatomy``. Hardware: two CPU cores. Time: about an hour, and 25 minutes.
"""

import sys
from pathlib import Path

import pandas as pd
import torch
from torch.nn import functional as F

from diff_transformer.checks import read_json
from diff_transformer.data.kv_recall_task import RecallTask, make_recall_batch, recall_vocabulary
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.evals.anatomy import anatomy
from diff_transformer.evals.hessian import hessian_eigenvalues
from diff_transformer.evals.lm import CausalLM
from diff_transformer.lab.recipes.desk import demo
from diff_transformer.lab.rows import FILE, REQUEST, row, write_rows
from diff_transformer.lab.stages import Stage
from diff_transformer.model.loading import read_model, read_tokenizer
from diff_transformer.train.config import RecallConfig

SEEDS = range(5)
SETTING, ROWS, STEPS = "p8_n2", 32, 30  # of the recall models; rows of the anatomy, steps of Lanczos


def stages(corpus: str) -> list[Stage]:
    """``corpus``: as ``data.corpus`` of a run; the demo's by default."""
    config = demo()
    config.data.corpus = corpus
    config.evaluation.more = {"anatomy": {"hessian": STEPS}}
    sides = {
        "softmax": {"variant": "softmax"},
        "softmax_norm": {"variant": "softmax_norm", "head_scale": "matched"},
        "diff": {"variant": "diff", "head_scale": "matched"},
        "v2": {"variant": "diff_v2", "head_scale": "matched"},
    }
    return [Stage({"demo": config}, sides, SEEDS, measure=("associative_recall", "anatomy"))]


def measure_recall(folder: Path, out: Path) -> None:
    """The mean anatomy of a finished run of recall on 32 rows, and the Hessian of its loss on their answers."""
    request, model = read_json(folder / REQUEST), folder / "run" / "model"
    identity = request["side"], request["seed"], request["setting"]
    lm = CausalLM(read_model(model), read_tokenizer(str(model)), folder.name)
    data = request["config"]["data"]
    of = RecallConfig(**data["recall"])
    task = RecallTask(data["length"], of.pairs, of.questions, of.distractors)
    vocabulary = recall_vocabulary(lm.tokenizer, of.symbols, of.noise_symbols)
    made = make_recall_batch(evaluation_rng(0, "anatomy"), vocabulary, task, ROWS)
    ids, answers = torch.from_numpy(made.ids), torch.from_numpy(made.answers)

    def loss(model):
        logits = model(input_ids=ids, use_cache=False).logits
        wanted = logits.gather(1, (answers - 1)[..., None].expand(-1, -1, logits.shape[-1]))
        return F.cross_entropy(wanted.flatten(0, 1), ids.gather(1, answers).flatten())

    eigenvalues = hessian_eigenvalues(lm.model, loss, STEPS).tolist()
    rows = [
        row("hessian", *identity, example=rank, rank=rank, value=eigenvalues[-rank if rank > 0 else 0])
        for rank in (1, -1)
    ]
    heads = pd.DataFrame([head for number in range(ROWS) for head in anatomy(lm, ids[number : number + 1])])
    del heads["importance"]  # by the loss of every token, of which most are noise
    means = heads.groupby(["layer", "head"], as_index=False).mean().to_dict("records")
    rows += [row("anatomy", *identity, example="mean", **head) for head in means]
    write_rows(out / SETTING / folder.name / FILE, rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    source, out = map(Path, sys.argv[1:])
    for folder in sorted((source / SETTING).glob("*-seed*")):
        if (folder / FILE).exists() and not (out / SETTING / folder.name / FILE).exists():
            measure_recall(folder, out)
