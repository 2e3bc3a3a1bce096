"""Budget of a step on paper: its real launches, and what a device would take for each."""
