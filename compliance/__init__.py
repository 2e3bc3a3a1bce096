"""What an MLPerf BERT log must hold, whether one does, and what a folder of them says. Reads files only."""

from console.interruption import show_in_one_line

show_in_one_line()
