"""Benchmarks that compare implementations. Every figure in the README comes from a file here."""
