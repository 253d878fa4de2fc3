"""Benchmarks: decode steps of reference models against what one could do without this package.

`configs` says which models, `variants` which ways of running them, `steps` times them, `figures`
holds the further measurements, `record` the file of results, `targets` what they are held against.
"""
