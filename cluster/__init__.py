"""Device facts, measurements of a cluster, predicted times, plans, and where the time of a run went."""

from console.interruption import show_in_one_line

show_in_one_line()
