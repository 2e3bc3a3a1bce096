"""Start of a run: ``python -m bert.launch`` starts, watches and judges the processes of ``bert.train``.

Nothing here imports PyTorch before it must, so that wrong input is refused within a second.
"""
