"""What a run costs on a machine: parts of a step, samples to converge, time to train, fitted to published results."""
