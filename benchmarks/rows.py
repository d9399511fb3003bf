"""How fast one thread makes the rows of a mixture, alone and beside a training step: benchmarks/results/rows_cpu.json.

python benchmarks/rows.py --out benchmarks/results/rows_cpu.json

The step is a fake of a fast device's: Python runs for part of it, as it does to launch kernels, and then waits. The
rows come through ``prefetched``, as in training; ``waited`` is the share of the time in which no batch was ready.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from diff_transformer.bench.record import collect
from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.filler import Filler
from diff_transformer.data.mixture import Mixture
from diff_transformer.data.needle_source import NeedleSource
from diff_transformer.data.packing import PackedCorpus
from diff_transformer.data.tokenizer import train_tokenizer
from diff_transformer.train.training_data import prefetched

LENGTH, ROWS, BATCHES = 1024, 64, 60
STEP, PYTHON = 0.032, (0.008, 0.016, 0.030)  # seconds of a step, and of Python in it: 2 million tokens a second


def measured() -> Iterator[dict]:
    """Rows of needles and of text, and of mixtures of them."""
    documents = load_corpus("python").train[:300]
    tokenizer = train_tokenizer([document.text for document in documents[:100]], 8192)
    sources = {
        "text": PackedCorpus.from_documents(documents, tokenizer, LENGTH),
        "needles": NeedleSource(Filler(documents), tokenizer, length=LENGTH, needles=(1, 2, 4, 6)),
    }
    for share in (0.0, 0.1, 0.3, 1.0):
        weights = {name: part for name, part in (("text", 1 - share), ("needles", share)) if part}
        mixture = Mixture({name: sources[name] for name in weights}, weights, ROWS)
        yield {"needles": share, "tokens_per_second": alone(mixture)}
        for busy in PYTHON:
            yield {"needles": share, "python_seconds": busy, "step_seconds": STEP, **beside_steps(mixture, busy)}


def alone(mixture: Mixture) -> float:
    """Tokens a second of batches made one after the other."""
    mixture.batch(0)
    begin = time.perf_counter()
    for step in range(1, BATCHES + 1):
        mixture.batch(step)
    return BATCHES * ROWS * LENGTH / (time.perf_counter() - begin)


def beside_steps(mixture: Mixture, busy: float) -> dict[str, float]:
    """The same in a thread beside steps that run Python for ``busy`` seconds of each."""
    waited = 0.0
    with prefetched(mixture.batch, 0, BATCHES, ahead=4) as batches:
        begin = time.perf_counter()
        for _ in range(BATCHES):
            asked = time.perf_counter()
            next(batches)
            waited += time.perf_counter() - asked
            end = time.perf_counter() + busy
            while time.perf_counter() < end:
                pass
            time.sleep(STEP - busy)
        seconds = time.perf_counter() - begin
    return {"tokens_per_second": BATCHES * ROWS * LENGTH / seconds, "waited": waited / seconds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    collect("rows", measured(), {"device": "cpu"}, out=parser.parse_args().out, on_row=print)
