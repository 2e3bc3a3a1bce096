"""Training beside peers and beside itself, on a CPU."""
