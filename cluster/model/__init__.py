"""Predictions of this program's step time and of a rank's memory, from the batch plan and the rates of the ranks."""
