"""Detection of ranks that fail or hang: every rank reports (watchdog.py) to a hub (hub.py) with a judge (judge.py)."""
