"""Benchmarks, one file a figure; each prints its ratio to a limit measured in the same run."""
