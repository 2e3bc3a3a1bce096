"""The data stages beside peers, on a CPU."""
