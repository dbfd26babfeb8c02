"""`python -m lmpack` is the `lmpack` command."""

from lmpack.cli.main import main

if __name__ == "__main__":
    main()
