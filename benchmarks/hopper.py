"""Try the Hopper kernels of one kind and width, with each masking, in a process that may be lost to them.

python benchmarks/hopper.py forward 64 cuda     # or two_pass, one_pass: a line of JSON each, with what is wrong or null
python benchmarks/hopper.py forward 64 cpu      # where there are none, says so of each
"""

import json
import sys
import time

import torch

from diff_transformer.ops.triton.gluon import verify, why_not_here


def main(kernels: str, width: str, device: str) -> int:
    verify.SECONDS = 10.0  # for a launch, of the little time that there is for all
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    for causal in (True, False):
        began = time.monotonic()
        fault = why_not_here(place, kernels) or verify.fault_of(place, int(width), torch.bfloat16, causal, kernels)
        row = {"form": kernels, "width": int(width), "causal": causal, "dtype": "bfloat16", "fault": fault}
        print(json.dumps({**row, "seconds": round(time.monotonic() - began, 2)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
