"""`python -m tilewise` runs the command `tilewise`, even if it is not on the search path."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C while its modules load ends it like a later Ctrl-C."""
    try:
        from tilewise.cli.main import main as run
    except KeyboardInterrupt:
        print("tilewise: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
