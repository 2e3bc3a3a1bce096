"""Execution of a step: prepares batches and runs passes operator by operator, as CUDA graphs or as pipeline stages."""
