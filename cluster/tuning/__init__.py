"""Settings that a run of a recipe is started with, measured on this machine and kept: ``python -m cluster tune``."""
