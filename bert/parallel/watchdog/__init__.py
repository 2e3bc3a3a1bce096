"""Ranks that fail, hang or straggle are named: what every rank sends (watchdog.py), and who hears it (hub.py)."""
