"""Rules of MLPerf BERT logs, checks of logs and submissions, and reports on them."""

from console.interruption import show_in_one_line

show_in_one_line()
