"""`python -m tokentape`."""

from tokentape.cli import main

if __name__ == "__main__":
    main()
