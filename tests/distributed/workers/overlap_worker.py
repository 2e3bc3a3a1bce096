"""``python -m bert.train`` with evaluations that are read a step later, as where steps are captured: on a CPU, for tests."""

import sys
from dataclasses import replace

import bert.run
from bert.loop import train
from bert.train import main

if __name__ == "__main__":
    bert.run.train = lambda run: train(replace(run, overlapping=True))
    sys.exit(main(sys.argv[1:]))
