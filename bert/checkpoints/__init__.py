"""Files of weights and training state, in this program's formats and in other programs' formats."""
