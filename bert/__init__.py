"""The benchmark program: one timed run of BERT pretraining."""

from console.interruption import show_in_one_line

show_in_one_line()
