"""Reference implementations of all ops in plain PyTorch, which define the ops and are the expected results in tests."""
