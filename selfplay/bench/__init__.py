"""Benchmarks: each measures a ratio against a named reference in one run, next to the absolute figure."""
