"""``python -m narrowgate`` is the same as the ``narrowgate`` command."""

from narrowgate.cli import main

if __name__ == "__main__":
    main()
