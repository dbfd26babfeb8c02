"""The `lmpack` command, also as `python -m lmpack`: until it listens, an interrupt ends it without a traceback."""

import signal

# In a background job it is ignored, and stays so.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from lmpack.cli.main import main

if __name__ == "__main__":
    main()
