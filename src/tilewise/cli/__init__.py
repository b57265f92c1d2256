"""The command line. The commands are in `tilewise.cli.main`. Nothing else is public."""

__all__: list[str] = []
