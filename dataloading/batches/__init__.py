"""Lengths to a balanced plan, and the plan to batches."""
