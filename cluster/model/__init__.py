"""Predictions of this program's step time and of a rank's memory, from the batch sampler and the rates of the ranks."""
