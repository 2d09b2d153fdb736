"""Benchmarks. Each prints one table, and one JSON with --json.

Speed is measured here and never in tests.
"""
