"""Planning of balanced batches from the samples' lengths, and loading of the planned batches."""
