"""Machines and what to do with them: facts of devices, a view of the cluster, the time before it is spent."""

from console.interruption import show_in_one_line

show_in_one_line()
