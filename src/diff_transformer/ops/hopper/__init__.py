"""Kernels for Hopper GPUs, written in Gluon: warp-specialised forward and backward of the Triton backend.

They compute what the plain Triton kernels compute, at the width where they were measured to be faster. Gluon is
experimental, and these kernels synchronise by hand: they run with the version of Triton of that record (support.py),
and with DIFF_TRANSFORMER_HOPPER=1 also with others. 0 switches them off. Tests marked ``gpu`` compare them with the
fp64 reference.

Reading order: pipeline.py (barriers), fwd_sequential.py, bwd_dq.py, bwd_dkdv.py; forward.py and backward.py launch
them.
"""
