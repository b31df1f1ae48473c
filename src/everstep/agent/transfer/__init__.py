"""Shards from agent to agent: backups to the peers, and back to newcomers from their memory."""
