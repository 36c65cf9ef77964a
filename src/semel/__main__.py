"""`python -m semel` is `semel`, where the script is not on the path."""

from semel.cli import main

if __name__ == "__main__":
    main()
