"""Processes, threads and settings of a recipe, measured on this machine and kept: ``python -m cluster tune``."""
