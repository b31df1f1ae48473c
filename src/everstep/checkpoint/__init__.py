"""Checkpoints: the format of a shard, slots in shared memory, the disk tier."""
