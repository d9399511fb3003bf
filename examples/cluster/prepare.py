"""Filter, deduplicate and tokenise a large corpus with datatrove, in parts that resume.

    pip install 'diff-transformer[prepare]'
    python examples/cluster/prepare.py OUT SOURCE... [--workers 8]

Run it again to continue. Change: the tokenizer, the filters, which are Gopher's, and the executor. On Slurm, return
SlurmPipelineExecutor(..., time="12:00:00", partition="cpu", depends=before) from each stage and run the last one; on
Ray, RayPipelineExecutor. OUT is on a file system that all machines share.
"""

import argparse
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter

from diff_transformer.data.pipeline import Read, Write
from diff_transformer.data.prepare import PrepareConfig, begin


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--tokenizer", default="bpe")
    parser.add_argument("--validation", type=float, default=0.01)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    out = given.out.absolute()
    config = PrepareConfig(tuple(given.sources), tokenizer=given.tokenizer, validation=given.validation)
    tasks = begin(config, out, resume=True)["settings"]["tasks"]

    def run(name: str, tasks: int, *pipeline) -> None:
        logs = str(out / "logs" / name)
        LocalPipelineExecutor([*pipeline], tasks, workers=min(given.workers, tasks), logging_dir=logs).run()

    def kept() -> list:
        return [Read(out), GopherRepetitionFilter(), GopherQualityFilter()]

    signatures, buckets, removed = (str(out / "dedup" / name) for name in ("signatures", "buckets", "removed"))
    run("signatures", tasks, *kept(), MinhashDedupSignature(signatures))
    run("buckets", MinhashConfig().num_buckets, MinhashDedupBuckets(signatures, buckets))
    run("clusters", 1, MinhashDedupCluster(buckets, removed))
    read, *filters = kept()
    run("write", tasks, read, *filters, MinhashDedupFilter(removed), Write(read))


if __name__ == "__main__":
    main()
