"""Code versions: immutable, content-addressed snapshots of the user's source roots.

The command line takes them, the controller keeps and merges them, agents fetch and run them.
"""
