"""Several ranks as real processes, each claim against an oracle on one process.

`launch.py` starts the ranks, `programs/` holds what they run. What a test compares with is computed
in the test's own process, from the whole model and without a process group.
"""
