"""Joining of a process with the other ranks: launcher's environment, port, attempt, hosts that sit out."""
