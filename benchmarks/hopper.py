"""Try the Hopper kernels of one kind at each width and masking, in a process that may be lost to them.

python benchmarks/hopper.py forward cuda     # or two_pass, one_pass: a line of JSON each, with what is wrong or null
python benchmarks/hopper.py forward cpu      # where there are none, says so of each
"""

import json
import sys
import time

import torch

from diff_transformer.ops.triton.gluon import BACKWARD_WIDTHS, WIDTHS, why_not_here
from diff_transformer.ops.triton.gluon.verify import fault_of


def main(kernels: str, device: str) -> int:
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    for D in WIDTHS if kernels == "forward" else BACKWARD_WIDTHS:
        for causal in (True, False):
            began = time.monotonic()
            fault = why_not_here(place, kernels) or fault_of(place, D, torch.bfloat16, causal, kernels)
            row = {"form": kernels, "width": D, "causal": causal, "dtype": "bfloat16", "fault": fault}
            print(json.dumps({**row, "seconds": round(time.monotonic() - began, 2)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
