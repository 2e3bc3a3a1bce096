"""``python -m bert.train`` that waits a second for a signal of its own, where ranks of another host got one: for tests."""

import sys

import bert.run
from bert.train import main

if __name__ == "__main__":
    bert.run._OWN_SIGNAL_S = 1.0
    sys.exit(main(sys.argv[1:]))
