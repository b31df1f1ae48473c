"""The command line: flags, plan, viewer, orders."""
