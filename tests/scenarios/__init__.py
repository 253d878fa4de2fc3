"""What engines with hybrid KV pools do, as small forwards to compile.

Each scenario is a forward over raw tensors and a reference in NumPy that writes one row at a time;
see `scenario.py`. `pytest tests/scenarios --scenario-table` prints what the passes did in each.
"""
