"""`python -m rulec`: the command line."""

from rulec.cli import main

if __name__ == "__main__":
    main()
