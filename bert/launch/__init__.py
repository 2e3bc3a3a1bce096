"""Start of a run: ``python -m bert.launch`` starts, watches and judges the processes of ``bert.train``.

These modules import PyTorch as late as possible, so that wrong input is refused within a second.
"""
