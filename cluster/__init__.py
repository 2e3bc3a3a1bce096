"""Cluster: facts of devices, a view of what machines can do, the time to train before it is spent, plans."""

from console.interruption import show_in_one_line

show_in_one_line()
