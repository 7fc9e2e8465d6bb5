"""Attention for Hopper (sm_90) in Gluon: the same launches as the portable kernels, faster.

guard.py decides when these kernels run, api.py holds what differs between Triton versions, and
docs/hopper-kernels.md says what the compiler needs and why the code looks as it does.
"""
