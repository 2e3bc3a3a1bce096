"""Timing of a step: the phase that a rank is in, and the seconds spent in each phase."""
