"""`python -m polyquant` is the `polyquant` command."""

from polyquant.cli import main

if __name__ == "__main__":
    main()
