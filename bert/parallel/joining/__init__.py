"""Joining of a process to the others: the launcher's environment, port, attempt, hosts that sit out."""
