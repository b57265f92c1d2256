"""`python -m tilewise` is `tilewise`, also if the command is not on PATH."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C during its imports exits with 130, as a later Ctrl-C does."""
    try:
        from tilewise.cli.main import main as run
    except KeyboardInterrupt:
        print("tilewise: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
