"""What an MLPerf BERT log must hold, whether one does, and what a folder of them says. Reads files only."""
