"""A program that makes a file, and then prints the name of each signal that it gets. It ends after a number of signals.

bash with traps in its place would lose about one SIGINT of fifty, because it drops those that arrive while a command ends.
"""

import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    expected = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, expected)
    Path(sys.argv[1]).touch()
    for _ in range(int(sys.argv[2])):
        os.write(2, f"got {signal.Signals(signal.sigwait(expected)).name}\n".encode())
    sys.exit(5)
