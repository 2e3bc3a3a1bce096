"""A step of this program and the memory of a rank, by part: from the plan of its batches and the rates of its ranks."""
