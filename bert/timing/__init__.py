"""Time of a step: the phase that a rank is in, and the seconds of each."""
