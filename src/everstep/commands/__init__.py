"""What the `everstep` command does: one file per group of commands, behind the thin cli.py."""
