"""`python -m tilewise` is `tilewise`, also where the command is on no path."""

import sys


def main() -> None:
    """The command line. Ctrl-C while it is loaded ends it as a later one does."""
    try:
        from tilewise.cli.main import main as run
    except KeyboardInterrupt:
        print("tilewise: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
