"""Measurements of hosts, devices and links, and the search for slow ones."""
