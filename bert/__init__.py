"""The benchmark program: one timed run of BERT pretraining."""
