"""Ranks: how they join, divide the work, exchange and watch one another."""
