"""The ops through libraries, where they are installed."""
