"""Measurements of hosts, devices and links, and what is slow among them."""
