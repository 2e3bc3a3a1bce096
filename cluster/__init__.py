"""Device facts, measurements of a cluster, predictions, plans and tuning."""

from console.interruption import show_in_one_line

show_in_one_line()
