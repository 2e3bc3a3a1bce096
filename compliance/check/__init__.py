"""The checks of a log, and the forms in which findings are shown."""
