"""Tuning: measures and stores the fastest number of processes and threads for a recipe on this machine."""
