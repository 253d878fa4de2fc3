"""Dumps as something to look at: pages, comparisons, a server on this machine.

Reads folders that `swa_compile.passes.dump` wrote and nothing else; needs no torch.
"""
