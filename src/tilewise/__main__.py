"""`python -m tilewise` is `tilewise`, also where the command is on no path."""

from tilewise.cli.main import main

if __name__ == "__main__":
    main()
