"""Device facts, cluster measurements, predicted times, plans, and breakdowns of a run's time."""

from console.interruption import show_in_one_line

show_in_one_line()
