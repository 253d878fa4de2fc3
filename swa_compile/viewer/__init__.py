"""Dumps as something to look at: pages, comparisons, a server on this machine.

Reads the folders that `swa_compile.passes.dump` wrote; compiles nothing and runs no graph.
"""
