"""The shell of the controller: its loop and its server."""
