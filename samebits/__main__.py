"""`python -m samebits`: the same as the command `samebits`."""

from samebits.cli import main

if __name__ == "__main__":
    main()
