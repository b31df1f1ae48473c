"""The shell on each machine: launcher, supervision of ranks, the link to the controller."""
