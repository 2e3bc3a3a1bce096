"""Rules of what an MLPerf BERT log must hold, checks whether one does, and reports on a folder of them. Reads files only."""

from console.interruption import show_in_one_line

show_in_one_line()
