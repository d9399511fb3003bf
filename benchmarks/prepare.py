"""Speed and memory of `prepare`, without an engine and as tasks of datatrove: benchmarks/results/prepare.json.

python benchmarks/prepare.py                     # 25 and 100 MB of text, two rounds
python benchmarks/prepare.py --mb 5 --rounds 1   # a trial; --out elsewhere

A row is one run: megabytes of text a second, start included, and the peak memory of its largest process. The runs of a
round follow each other, so that ratios within a round are of one state of the machine. The text is the running
Python's library, its lines shuffled anew for each copy.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from diff_transformer.bench.record import collect
from diff_transformer.data.python_library import load_python_library

OUT = Path(__file__).resolve().parent / "results" / "prepare.json"
FILES = 4
FORMS = {"none": [], "local": ["--engine", "local", "--tasks", str(FILES)]}


def write_text(folder: Path, megabytes: int) -> None:
    """JSON lines of about ``megabytes`` of text in ``FILES`` files."""
    folder.mkdir()
    texts = [document.text.splitlines() for document in load_python_library().train]
    generator = random.Random(0)
    for number in range(FILES):
        left = megabytes * 1_000_000 // FILES
        with (folder / f"{number}.jsonl").open("w") as file:
            while left > 0:
                lines = generator.choice(texts)
                generator.shuffle(lines)
                file.write(json.dumps({"text": "\n".join(lines)}) + "\n")
                left -= sum(map(len, lines))


def measure(command: list[str]) -> tuple[float, int]:
    """Seconds, and the peak memory in bytes of the largest process. To be called in a new process."""
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun, 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


def rows(sizes: list[int], rounds: int, jobs: int, home: Path) -> Iterator[dict]:
    """A row for each size, round and form."""
    command = [sys.executable, "-m", "diff_transformer", "prepare"]
    for megabytes in sizes:
        write_text(home / str(megabytes), megabytes)
    tokenizer = home / "first"
    subprocess.run([*command, str(home / str(min(sizes))), "--out", str(tokenizer)], check=True)
    for megabytes in sizes:
        for number in range(rounds):
            for form, options in FORMS.items():
                out = home / f"{megabytes}-{number}-{form}"
                given = [str(home / str(megabytes)), "--out", str(out), "--tokenizer", str(tokenizer / "tokenizer")]
                with get_context("spawn").Pool(1) as pool:
                    seconds, peak = pool.apply(measure, ([*command, *given, "--jobs", str(jobs), *options],))
                manifest = json.loads((out / "manifest.json").read_text())
                text = sum(manifest[side]["text_bytes"] for side in ("train", "validation"))
                found = {"mb_per_s": text / 1e6 / seconds, "peak_bytes": peak, "text_bytes": text, "seconds": seconds}
                yield {"engine": form, "mb": megabytes, "round": number, "jobs": jobs, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[25, 100])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    with TemporaryDirectory() as home:
        collect(
            "prepare",
            rows(given.mb, given.rounds, given.jobs, Path(home)),
            {"mb": given.mb, "rounds": given.rounds, "jobs": given.jobs},
            out=given.out,
            on_row=lambda row: print({key: round(row[key], 1) if key == "mb_per_s" else row[key] for key in row}),
        )


if __name__ == "__main__":
    main()
